"""Runs a checkpoint's draft head (multi-token prediction) after each step, on the step's own tokens.

The head is one more layer of the model, whose keys and values are in the arena like any other's. Its input at a place
is the model's hidden state there, and the token after it: for a prompt the next one of the text, else the one that the
step has just chosen. So it runs after the choice of tokens, in the same step, without waiting for the host. What it
makes of the newest tokens becomes a drafted token only when somebody asks: the output head's weights are read then.

Keys and values of the head after rejected drafts are overwritten like the model's. In a block that several texts share,
those of its last token come from the text that computed it: a text that goes on differently drafts a little worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from cortexmlx.attention.mlx_lm_hook import LayerCache
from cortexmlx.models.draft_head import DraftHead
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan
from cortexmlx.speculation.drafter import HeadRow


class HeadPass:
    """The draft head of a runner's model, and what it made of the newest step. `cache` is its layer's."""

    def __init__(self, head: DraftHead, cache: LayerCache) -> None:
        self._head = head
        self._cache = cache
        self.forget()

    def forget(self) -> None:
        """Forget the newest step."""
        self._newest: tuple[Sequence[Segment], mx.array] | None = None

    def run(self, plan: StepPlan, hidden: mx.array, tokens: mx.array, chosen: mx.array | None) -> list[mx.array]:
        """Run the head on a step of flat `tokens` `[T]`, whose states after the model's last norm are `hidden`
        `[T, width]`. `chosen` are the tokens that the step chose for its `logit_rows`. Return the arrays to compute.
        """
        states = self._head(hidden[:, None], self._head.embed(_next_tokens(plan, tokens, chosen))[:, None], self._cache)
        if not len(plan.logit_rows):  # its keys and values are all that is needed
            return []
        rows = states if len(plan.logit_rows) == len(plan.positions) else states[mx.array(plan.logit_rows)]
        self._newest = plan.logit_segments, rows
        return [rows]

    def propose(self, rows: Sequence[HeadRow]) -> list[int | None]:
        """Return the likeliest next token of each row after its newest one; None if the newest step had
        not that one. No step may be in flight.
        """
        if self._newest is None:
            return [None] * len(rows)
        segments, states = self._newest
        places: list[int | None] = []
        firsts: dict[tuple[int, int], tuple[int, range]] = {}
        end = 0
        for segment in segments:
            firsts[segment.job, segment.generation] = end, segment.logits
            end += len(segment.logits)
        for job, generation, position in rows:
            first, logits = firsts.get((job, generation), (0, range(0)))
            places.append(first + position - logits.start if position in logits else None)
        known = [place for place in places if place is not None]
        if not known:
            return places
        tokens = np.array(mx.argmax(self._head.project(states[mx.array(known)])[:, 0], axis=-1)).tolist()
        return [None if place is None else tokens[known.index(place)] for place in places]


def _next_tokens(plan: StepPlan, tokens: mx.array, chosen: mx.array | None) -> mx.array:
    """Return the token after each of a step's: chosen by it, or the next one of its text."""
    if plan.kind is StepKind.DECODE:
        assert chosen is not None
        return mx.maximum(chosen, 0)
    assert plan.tokens is not None and plan.following is not None
    following = np.append(plan.tokens[1:], 0).astype(np.int32)
    following[np.cumsum([segment.count for segment in plan.segments]) - 1] = plan.following
    result = mx.array(following)
    if chosen is not None:
        result[mx.array(plan.logit_rows)] = mx.maximum(chosen, 0)
    return result
