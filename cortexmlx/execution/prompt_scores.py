"""Log-probabilities and pooled states of prompts' tokens, from the hidden states that a step keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.execution.boundary import TokenScores, Vector
from cortexmlx.execution.logits import log_sum_exp, top_tokens
from cortexmlx.execution.output_projection import OutputProjection
from cortexmlx.scheduling.plan import Pooling, StepPlan
from cortexmlx.types.arrays import IntArray


@dataclass(frozen=True)
class PromptResults:
    """What a step computed for its plan's `scoring` and `pooling`: log-probabilities, and pooled states, of prompts."""

    scores: TokenScores | None = None
    pooled: tuple[Vector, ...] = ()


def find_kept_rows(plan: StepPlan) -> IntArray | None:
    """Return the flat indices of the tokens whose hidden states a step has to keep; None if there are none."""
    if not plan.has_prompt_results:
        return None
    row_sources = (plan.scoring, plan.pooling)
    return np.concatenate([part.rows for part in row_sources if part is not None])


class KeptStates:
    """The hidden states of prompt tokens that a step keeps for scoring and pooling, ordered as by `find_kept_rows`."""

    def __init__(self, kept_states: mx.array, plan: StepPlan, projection: OutputProjection, vocab_size: int) -> None:
        self._kept_states = kept_states
        self._plan = plan
        self._projection = projection
        self._at_once = rows_at_once(vocab_size)

    def compute_results(self) -> PromptResults:
        """Compute the scores and pooled states that the plan asks for. The step's pass must have been started."""
        scoring, pooling, scored_count = self._plan.scoring, self._plan.pooling, 0
        scores = None
        if scoring is not None:
            scored_count = len(scoring.rows)
            project, scored_states = self._projection.project, self._kept_states[:scored_count]
            scores = score_tokens(lambda part: project(scored_states[part]), scoring.tokens, scoring.top, self._at_once)
        return PromptResults(scores, () if pooling is None else self._pool(self._kept_states[scored_count:], pooling))

    def _pool(self, kept_states: mx.array, pooling: Pooling) -> tuple[Vector, ...]:
        """Return for each pooled segment the weighted sum of its states, or the logits that it asks for."""
        ends = np.cumsum(pooling.counts).tolist()
        begins = [0, *ends[:-1]]
        parts: list[mx.array] = [mx.zeros(0)] * len(ends)
        logit_segments = [index for index, tokens in enumerate(pooling.logits) if tokens]
        for first in range(0, len(logit_segments), self._at_once):
            batch = logit_segments[first : first + self._at_once]
            projected_logits = self._projection.project(kept_states[mx.array([ends[place] - 1 for place in batch])])
            for row, place in enumerate(batch):
                parts[place] = projected_logits[row][mx.array(pooling.logits[place])].astype(mx.float32)
            mx.eval([parts[place] for place in batch])
        if len(logit_segments) < len(ends):
            states = self._projection.hidden_states(kept_states).astype(mx.float32)
            weights = mx.array(pooling.weights)[:, None]
            for place, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                if not pooling.logits[place]:
                    parts[place] = (states[begin:end] * weights[begin:end]).sum(axis=0)
        mx.eval(parts)
        return tuple(np.array(part) for part in parts)


# Log-probabilities of known tokens, such as a prompt's, from a few rows of logits at a time.


_LOGITS_AT_ONCE = 1 << 23
"""How many logits exist at a time: 32 MiB in float32, unless that is fewer than `_MIN_ROWS` rows."""

_MIN_ROWS, _MAX_ROWS = 16, 256


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are computed at a time, to bound their memory."""
    return max(_MIN_ROWS, min(_MAX_ROWS, _LOGITS_AT_ONCE // vocab_size))


def score_tokens(logits: Callable[[slice], mx.array], tokens: IntArray, top: int, at_once: int) -> TokenScores:
    """Return the log-probabilities of `tokens [n]`, and the `top` likeliest tokens at the place of each.

    `logits(part)` returns the logits before these tokens, `[len, vocab]`. The parts come in order. Each is processed
    before the next is asked for, and only its results are kept.
    """
    parts = (slice(first, first + at_once) for first in range(0, len(tokens), at_once))
    return join_scores([_score_rows(logits(part), tokens[part], top) for part in parts])


def join_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Concatenate the scores of several parts, of which there is at least one."""
    fields = ("logprobs", "top_ids", "top_logprobs")
    return TokenScores(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


def _score_rows(logits: mx.array, tokens: IntArray, top: int) -> TokenScores:
    """Return the scores of `tokens` from the logits before each of them."""
    logits = logits.astype(mx.float32)
    total = log_sum_exp(logits)
    token_logprobs = (mx.take_along_axis(logits, mx.array(tokens)[:, None], axis=1) - total)[:, 0]
    if not top:
        none = np.zeros((len(tokens), 0))
        return TokenScores(_to_numpy(token_logprobs), none.astype(np.int32), none.astype(np.float32))
    top_logprobs, top_ids = top_tokens(logits, min(top, logits.shape[-1]))
    top_logprobs = top_logprobs - total
    mx.eval(token_logprobs, top_logprobs, top_ids)
    return TokenScores(_to_numpy(token_logprobs), _to_numpy(top_ids), _to_numpy(top_logprobs))


def _to_numpy(array: mx.array) -> Any:
    return np.array(array)
