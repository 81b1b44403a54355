"""Runs what drafts from a model's own states: its checkpoint's draft head (multi-token prediction), or an assistant.

A **draft head** is one more layer of the model, whose keys and values are in the arena like any other's. Its input at a
place is the model's hidden state there, and the token after it: for a prompt the next one of the text, else the one
that the step has just chosen. So it runs after the choice of tokens, in the same step, without waiting for the host.
What it makes of the newest tokens becomes a drafted token only when somebody asks: the output head's weights are read
then. For the tokens after that one, it gets its own states in place of the model's.

Keys and values of the head after rejected drafts are overwritten like the model's. In a block that several texts share,
those of its last token come from the text that computed it: a text that goes on differently drafts a little worse.

An **assistant** keeps nothing. It reads the model's own keys and values, and runs only when somebody asks. Of a step,
the states of the newest tokens are kept for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from cortexmlx.attention.mlx_lm_hook import LayerCache
from cortexmlx.attention.paged import Attend, PagedKV, StepDerivedData
from cortexmlx.execution.paged_memory import PagedMemory, write_tail_column
from cortexmlx.kv.arena import Slab
from cortexmlx.kv.step import GroupStep
from cortexmlx.models.assistant import Assistant
from cortexmlx.models.draft_head import DraftHead
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan
from cortexmlx.speculation.drafter import HeadRow


@dataclass
class RowKeys:
    """Where attention finds the keys and values of rows while tokens are drafted: in the arena, as `groups`
    say, and then in the first `columns_used` columns of `tail`. Those of drafted tokens go to its copy, `drafted`.
    """

    memory: PagedMemory
    attend: Attend
    groups: Sequence[GroupStep]
    derived: Sequence[StepDerivedData]
    tail: dict[int, Slab]
    columns_used: int
    columns: int
    drafted: dict[int, Slab] = field(default_factory=dict)

    def find(self, layer: int, dtype: mx.Dtype) -> PagedKV:
        """Return where attention finds the keys and values of a layer. The queries are of `dtype`."""
        return self._make_paged_kv(layer, dtype, self.tail.get(layer), self.columns_used)

    def add(self, layer: int, keys: mx.array, values: mx.array | None) -> PagedKV:
        """Add the keys and values `[rows, kv_heads, 1, dim]` of one drafted token per row. Return what `find` does."""
        new: Slab = (keys,) if values is None else (keys, values)
        form = self.memory.arena.quantization(layer)
        if form is not None:
            new = form.quantize(*new)
        if layer not in self.drafted and self.columns_used:
            self.drafted[layer] = tuple(map(mx.array, self.tail[layer]))  # the columns are written in place
        tail = write_tail_column(self.drafted.get(layer), self.columns_used, self.columns, new)
        self.drafted[layer] = tail
        self.columns_used += 1
        return self._make_paged_kv(layer, keys.dtype, tail, self.columns_used)

    def _make_paged_kv(self, layer: int, dtype: mx.Dtype, tail: Slab | None, tail_tokens: int) -> PagedKV:
        arena = self.memory.arena
        group, form = arena.group_of[layer], arena.quantization(layer)
        step, derived = self.groups[group], self.derived[group]
        return PagedKV(arena, layer, step, tail, tail_tokens, dtype, self.attend, derived, form)


class StateDrafts(ABC):
    """Drafts tokens from the newest step's hidden states: of all tokens if `sees_all_tokens`, or those with logits."""

    sees_all_tokens = True

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the newest step."""
        self._newest: tuple[Sequence[Segment], mx.array] | None = None

    @abstractmethod
    def run(
        self,
        plan: StepPlan,
        hidden: mx.array,
        tokens: mx.array,
        chosen: mx.array | None,
        embeddings: mx.array | None = None,
    ) -> list[mx.array]:
        """Keep what `propose` needs of a step of flat `tokens` `[T]`, and return the arrays to compute. `hidden`
        `[T, width]` are the states after the model's last norm, or those of `logit_rows` only. `chosen` are the tokens
        that the step sampled there, and `embeddings` `[T, 1, width]` those of a step with images.
        """

    @abstractmethod
    def _draft_tokens(
        self, states: mx.array, newest: mx.array, positions: mx.array, count: int, keys: RowKeys | None
    ) -> list[mx.array]:
        """Draft up to `count` tokens for each of n rows, an array `[n]` each. `states` `[n, 1, width]`, at `positions`
        `[n]`, are what `run` kept. `newest` `[n]` are the rows' newest tokens, one position later.
        """

    def propose(self, rows: Sequence[HeadRow], count: int, keys: RowKeys | None) -> list[tuple[int, ...]]:
        """Return up to `count` drafted tokens after each row's newest token; none for a row that had no token in the
        last step. The rows of `keys` are `rows`, in order, or those of the last step if it is in the tail. Without
        `keys`, at most one token is drafted. No step may be in flight.
        """
        if self._newest is None:
            return [()] * len(rows)
        segments, states = self._newest
        places: list[int | None] = []
        firsts: dict[tuple[int, int], tuple[int, range]] = {}
        end = 0
        for segment in segments:
            firsts[segment.job, segment.generation] = end, segment.logits
            end += len(segment.logits)
        for job, generation, position, _, _ in rows:
            first, logits = firsts.get((job, generation), (0, range(0)))
            places.append(first + position - logits.start if position in logits else None)
        if not any(place is not None for place in places):
            return [()] * len(rows)
        in_tail = keys is not None and keys.columns_used > 0
        lanes = list(range(end)) if in_tail else [place or 0 for place in places]
        newest, positions = np.zeros((2, len(lanes)), np.int32)
        indices = [place or 0 if in_tail else index for index, place in enumerate(places)]
        for index, place, (_, _, position, token, shift) in zip(indices, places, rows, strict=True):
            if place is not None:
                newest[index], positions[index] = token, position + shift
        guesses = self._draft_tokens(states[mx.array(lanes)], mx.array(newest), mx.array(positions), count, keys)
        tokens = np.array(mx.stack(guesses, axis=1)).tolist()
        return [() if place is None else tuple(tokens[index]) for index, place in zip(indices, places, strict=True)]


class HeadDrafts(StateDrafts):
    """Drafts tokens with a draft head. `layer` is the number of its layer, and `cache` that layer's cache in steps."""

    def __init__(self, head: DraftHead, layer: int, cache: LayerCache) -> None:
        super().__init__()
        self._head = head
        self._layer = layer
        self._cache = cache

    def run(
        self,
        plan: StepPlan,
        hidden: mx.array,
        tokens: mx.array,
        chosen: mx.array | None,
        embeddings: mx.array | None = None,
    ) -> list[mx.array]:
        following = self._head.embed(_next_tokens(plan, tokens, chosen))[:, None]
        if embeddings is not None and plan.tokens is not None:
            seen = np.flatnonzero(plan.tokens[1:] < 0)  # the next piece's first one, perhaps: a worse guess, no more
            if len(seen):
                following[mx.array(seen)] = embeddings[mx.array(seen + 1)]
        states = self._head(hidden[:, None], following, self._cache)
        if not len(plan.logit_rows):  # its keys and values are all that is needed
            return []
        rows = states if len(plan.logit_rows) == len(plan.positions) else states[mx.array(plan.logit_rows)]
        self._newest = plan.logit_segments, rows
        return [rows]

    def _draft_tokens(
        self, states: mx.array, newest: mx.array, positions: mx.array, count: int, keys: RowKeys | None
    ) -> list[mx.array]:
        tokens = [mx.argmax(self._head.project(states)[:, 0], axis=-1)]
        if keys is not None:
            cache = LayerCache(self._layer, keys.add)
            for number in range(1, min(count, 1 + keys.columns - keys.columns_used)):
                cache.begin(positions + number)
                states = self._head(states, self._head.embed(tokens[-1])[:, None], cache)
                tokens.append(mx.argmax(self._head.project(states)[:, 0], axis=-1))
        return tokens


class AssistantDrafts(StateDrafts):
    """Drafts tokens with an assistant, which reads the model's own keys and values."""

    sees_all_tokens = False

    def __init__(self, assistant: Assistant) -> None:
        super().__init__()
        self._assistant = assistant

    def run(
        self,
        plan: StepPlan,
        hidden: mx.array,
        tokens: mx.array,
        chosen: mx.array | None,
        embeddings: mx.array | None = None,
    ) -> list[mx.array]:
        if not len(plan.logit_rows):
            return []
        rows = hidden if len(hidden) == len(plan.logit_rows) else hidden[mx.array(plan.logit_rows)]
        self._newest = plan.logit_segments, rows[:, None]
        return [rows]

    def _draft_tokens(
        self, states: mx.array, newest: mx.array, positions: mx.array, count: int, keys: RowKeys | None
    ) -> list[mx.array]:
        assert keys is not None
        tokens, dtype = [newest], states.dtype
        for _ in range(count):
            embeddings = self._assistant.embed(tokens[-1])[:, None]
            states, own = self._assistant(states, embeddings, positions, lambda layer: (keys.find(layer, dtype),) * 2)
            tokens.append(self._assistant.choose(own))
        return tokens[1:]


def _next_tokens(plan: StepPlan, tokens: mx.array, chosen: mx.array | None) -> mx.array:
    """Return the token after each token of a step: the one that the step sampled, or the next one of the prompt."""
    if plan.kind is StepKind.DECODE:
        assert chosen is not None
        return mx.maximum(chosen, 0)
    assert plan.tokens is not None and plan.following is not None
    following = np.append(plan.tokens[1:], 0).astype(np.int32)
    following[np.cumsum([segment.count for segment in plan.segments]) - 1] = plan.following
    result = mx.array(np.maximum(following, 0))  # those of images are negative
    if chosen is not None:
        result[mx.array(plan.logit_rows)] = mx.maximum(chosen, 0)
    return result
