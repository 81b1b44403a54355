"""What is asked of prompts' tokens besides the next one, from the hidden states that a step keeps of them:
log-probabilities, and sums of states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.execution.boundary import TokenScores, Vector
from cortexmlx.execution.logit_rows import LogitRows
from cortexmlx.execution.logits import log_total, top_tokens
from cortexmlx.scheduling.plan import Pooling, StepPlan
from cortexmlx.types.arrays import IntArray


@dataclass(frozen=True)
class PromptResults:
    """The results of a step for its plan's `scoring` and `pooling`."""

    scores: TokenScores | None = None
    pooled: tuple[Vector, ...] = ()


def kept_rows(plan: StepPlan) -> IntArray | None:
    """Return the flat indices of the tokens whose hidden states a step keeps; None if it keeps none."""
    if not plan.asks_of_prompts:
        return None
    asked = (plan.scoring, plan.pooling)
    return np.concatenate([part.rows for part in asked if part is not None])


class KeptStates:
    """The hidden states that a step keeps, in the order of `kept_rows`."""

    def __init__(self, kept: mx.array, plan: StepPlan, rows: LogitRows, vocab_size: int) -> None:
        self._kept = kept
        self._plan = plan
        self._rows = rows
        self._at_once = rows_at_once(vocab_size)

    def results(self) -> PromptResults:
        """Compute what the plan asks for. The step's pass must have been started."""
        scoring, pooling, scored = self._plan.scoring, self._plan.pooling, 0
        scores = None
        if scoring is not None:
            scored = len(scoring.rows)
            project, kept = self._rows.project, self._kept[:scored]
            scores = scores_of(lambda part: project(kept[part]), scoring.tokens, scoring.top, self._at_once)
        return PromptResults(scores, () if pooling is None else self._pooled(self._kept[scored:], pooling))

    def _pooled(self, kept: mx.array, pooling: Pooling) -> tuple[Vector, ...]:
        ends = np.cumsum(pooling.counts).tolist()
        begins = [0, *ends[:-1]]
        parts: list[mx.array] = [mx.zeros(0)] * len(ends)
        logits = [place for place, tokens in enumerate(pooling.logits) if tokens]
        for first in range(0, len(logits), self._at_once):
            some = logits[first : first + self._at_once]
            projected = self._rows.project(kept[mx.array([ends[place] - 1 for place in some])])
            for row, place in enumerate(some):
                parts[place] = projected[row][mx.array(pooling.logits[place])].astype(mx.float32)
            mx.eval([parts[place] for place in some])
        if len(logits) < len(ends):
            states = self._rows.states(kept).astype(mx.float32)
            weights = mx.array(pooling.weights)[:, None]
            for place, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                if not pooling.logits[place]:
                    parts[place] = (states[begin:end] * weights[begin:end]).sum(axis=0)
        mx.eval(parts)
        return tuple(np.array(part) for part in parts)


# Log-probabilities of known tokens, such as a prompt's, from a few rows of logits at a time.


_LOGITS_AT_ONCE = 1 << 23
"""How many logits exist at a time: 32 MiB in float32, unless that is fewer than `_LEAST_ROWS` rows."""

_LEAST_ROWS, _MOST_ROWS = 16, 256


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows of logits are computed at a time."""
    return max(_LEAST_ROWS, min(_MOST_ROWS, _LOGITS_AT_ONCE // vocab_size))


def scores_of(logits: Callable[[slice], mx.array], tokens: IntArray, top: int, at_once: int) -> TokenScores:
    """Return the log-probabilities of `tokens [n]`, and the `top` likeliest tokens at the place of each.

    `logits(part)` returns the logits before these tokens, `[len, vocab]`. The parts come in order. Each is processed
    before the next is asked for, and only its results are kept.
    """
    parts = (slice(first, first + at_once) for first in range(0, len(tokens), at_once))
    return joined([_scored(logits(part), tokens[part], top) for part in parts])


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """Return the scores of several parts, one after the other. There must be at least one part."""
    fields = ("logprobs", "top_ids", "top_logprobs")
    return TokenScores(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


def _scored(logits: mx.array, tokens: IntArray, top: int) -> TokenScores:
    logits = logits.astype(mx.float32)
    total = log_total(logits)
    own = (mx.take_along_axis(logits, mx.array(tokens)[:, None], axis=1) - total)[:, 0]
    if not top:
        none = np.zeros((len(tokens), 0))
        return TokenScores(_host(own), none.astype(np.int32), none.astype(np.float32))
    best, ids = top_tokens(logits, min(top, logits.shape[-1]))
    best = best - total
    mx.eval(own, best, ids)
    return TokenScores(_host(own), _host(ids), _host(best))


def _host(array: mx.array) -> Any:
    return np.array(array)
