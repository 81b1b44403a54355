"""The states of recurrent layers: each row's state after its tokens so far, and snapshots of some states.

All arrays here are immutable: a step makes new ones, so nothing waits for a step to be drained. Rows that are computed
together have their states in one batch. If the next step has the same rows, it takes the batch unchanged, as it does
within a decode window. At an answer's end, the row's state is after `Job.state_at` tokens: the last token is in it if
the next step was planned already. `RunningSet.release_blocks` has it saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import mlx.core as mx
import numpy as np

from cortexmlx.attention.recurrent import RecordedCall, RecurrentCache, SpanStep, TokenSpan, replay_calls
from cortexmlx.errors import KVBlockError
from cortexmlx.kv.snapshots import Row, RowSnapshot, StateOps
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan
from cortexmlx.types.arrays import IntArray

States = tuple[tuple[mx.array | None, ...], ...]
"""The arrays of some rows `[rows, ...]`, for each leaf and each of its slots; None if nothing was written there."""


@dataclass(frozen=True, eq=False)
class StateBatch:
    """The recurrent states of `rows` rows, which are computed together."""

    states: States
    rows: int

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes of one row's arrays. Only states of equal shapes are computed together."""
        return tuple(None if a is None else a.shape[1:] for leaf in self.states for a in leaf)

    def arrays(self) -> Iterator[mx.array]:
        """Yield the arrays that are not None."""
        return (a for leaf in self.states for a in leaf if a is not None)

    def take_rows(self, rows: Sequence[int]) -> StateBatch:
        """Return a copy of some rows."""
        index = mx.array(list(rows), mx.int32)
        return StateBatch(_map_slots([self.states], lambda arrays: mx.take(arrays[0], index, axis=0)), len(rows))


@dataclass(frozen=True, eq=False)
class VerifiedSpan:
    """A span of `length` tokens of some rows, the last of which may be rejected drafts. The states `before` it, and the
    calls of recurrent modules, by leaf, are kept to compute the state after any of its tokens.
    """

    before: StateBatch
    calls: Sequence[Sequence[RecordedCall]]
    length: int

    def compute_state(self, rows: Sequence[int], tokens: int) -> StateBatch:
        """Return the states of some of the rows after the span's first `tokens` tokens."""
        is_whole = list(rows) == list(range(self.before.rows))
        start = self.before if is_whole else self.before.take_rows(rows)
        if not tokens:
            return start
        states = [replay_calls(calls, leaf, rows, tokens) for leaf, calls in zip(start.states, self.calls, strict=True)]
        return StateBatch(tuple(states), len(rows))


@dataclass(frozen=True)
class StatePlace:
    """Where a sequence's recurrent state after `tokens` tokens lies: row `row` of `batch`. If there is a `span`, its
    last tokens are drafts that may be rejected.
    """

    batch: StateBatch
    row: int
    tokens: int
    span: VerifiedSpan | None = None

    def offset_in_span(self, tokens: int) -> int:
        """Return where in the span the row's first `tokens` tokens end: 0 at its begin, below 0 if before it."""
        assert self.span is not None
        return self.span.length - (self.tokens - tokens)


class StateStore:
    """The recurrent states of all rows, and snapshots of some. `sizes` has the number of arrays (slots) of each leaf's
    state. The model gets `leaves` in place of its own caches; each passes its module's inputs to `feed`.
    """

    def __init__(self, sizes: Mapping[int, int], feed: Callable[..., None] = lambda *_: None) -> None:
        self.leaves = {leaf: RecurrentCache(size, feed) for leaf, size in sizes.items()}
        self._empty = tuple((None,) * size for size in sizes.values())
        self._snapshots: dict[int, StateBatch] = {}
        self.forget_rows()

    def forget_rows(self) -> None:
        """Drop the rows' states, but not the snapshots."""
        self._current_places: dict[Row, StatePlace] = {}
        self._step: SpanStep | None = None
        self._batch: StateBatch | None = None
        self._segments: tuple[Segment, ...] = ()
        self._step_snapshots: dict[Row, list[RowSnapshot]] = {}
        self._starts: list[StateBatch | None] = []
        for leaf in self.leaves.values():
            leaf.end()

    def forget(self) -> None:
        """Drop all states and snapshots."""
        self.forget_rows()
        self._snapshots.clear()

    @property
    def step(self) -> SpanStep | None:
        """How the step's tokens are cut into parts for recurrent layers; None if the model has none."""
        return self._step if self.leaves else None

    def snapshot(self, name: int) -> StateBatch | None:
        """Return a snapshot's state; None if it does not exist. Without recurrent layers, return an empty state."""
        return self._snapshots.get(name) if self.leaves else StateBatch((), 1)

    def restore(self, name: int, arrays: Sequence[mx.array | None]) -> None:
        """Set a snapshot from arrays `[1, ...]`, one for each slot of each leaf in order; None for an empty slot."""
        if not self.leaves:
            return
        rest = iter(arrays)
        self._snapshots[name] = StateBatch(tuple(tuple(next(rest) for _ in leaf) for leaf in self._empty), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all states and snapshots, and of what is kept because drafts may be rejected."""
        spans = self._spans()
        arrays = [*self.arrays(), *self.recorded_arrays(), *(a for span in spans for a in span.before.arrays())]
        return sum(array.nbytes for array in arrays)

    def arrays(self) -> list[mx.array]:
        """Return the arrays of all states and snapshots, for evaluation."""
        batches = {id(b): b for b in (*(p.batch for p in self._current_places.values()), *self._snapshots.values())}
        return [array for batch in batches.values() for array in batch.arrays()]

    def recorded_arrays(self) -> list[mx.array]:
        """Return the arrays that are kept because drafts may be rejected."""
        return [a for span in self._spans() for calls in span.calls for call in calls for a in call.arrays()]

    def _spans(self) -> set[VerifiedSpan]:
        """Return the spans of which some tokens may be rejected."""
        return {place.span for place in self._current_places.values() if place.span is not None}

    def outline_rows(self, segments: Sequence[Segment]) -> list[mx.array]:
        """Return arrays of zeros, never computed, with the shapes of the rows' states, for `begin_rows`."""
        batches = [self._current_places[segment.job, segment.generation].batch for segment in segments]
        return [mx.zeros((1, *array.shape[1:]), array.dtype) for batch in batches for array in batch.arrays()]

    def begin_rows(self, segments: Sequence[Segment], arrays: Sequence[mx.array]) -> None:
        """Give rows the states `arrays`, in the order of `outline_rows`. All slots have one."""
        rest = iter(arrays)
        for segment in segments:
            batch = StateBatch(tuple(tuple(next(rest) for _ in leaf) for leaf in self._empty), 1)
            self._current_places[segment.job, segment.generation] = StatePlace(batch, 0, segment.first)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Give the model's leaves the states with which a step begins. Raises KVBlockError if one does not exist."""
        self.carry_out(plan.states)
        self._step_snapshots = {}
        for snapshot in plan.states.step_snapshots:
            self._step_snapshots.setdefault(snapshot.row, []).append(snapshot)
        if plan.kind is not StepKind.DECODE or plan.groups is not None or self._batch is None:
            self._drop_rejected_drafts(plan.segments)
            parts = [*self._single_token_parts(plan.segments), *self._piece_parts(plan)]
            self._step = SpanStep([part for part, _ in parts])
            states = [batch.states if batch is not None else self._empty for _, batch in parts]
        else:
            states = [self._batch.states]
        assert self._step is not None
        self._segments = plan.segments
        self._starts = [
            StateBatch(state, len(part.tokens)) if part.is_verified else None
            for part, state in zip(self._step.parts, states, strict=True)
        ]
        for index, leaf in enumerate(self.leaves.values()):
            leaf.begin(self._step, (state[index] for state in states))
        # Nobody else may hold what the step begins with: then MLX makes the next state in its memory.
        self._batch = None
        for segment in plan.segments:
            if segment.live:
                self._current_places.pop((segment.job, segment.generation), None)

    def end_step(self) -> list[mx.array]:
        """Take the new states from the model's leaves after a step. Return the arrays to evaluate."""
        assert self._step is not None
        by_leaf = [leaf.end() for leaf in self.leaves.values()]
        parts = self._step.parts
        batches = [
            StateBatch(tuple(tuple(states[i]) for states, _ in by_leaf), len(part.tokens))
            for i, part in enumerate(parts)
        ]
        self._batch = batches[0] if len(batches) == 1 and parts[0].tokens.shape[1] == 1 else None
        place_of: dict[int, tuple[StateBatch, int, VerifiedSpan | None]] = {}
        for index, (part, batch, start) in enumerate(zip(parts, batches, self._starts, strict=True)):
            span = None
            if start is not None:
                span = VerifiedSpan(start, [calls[index] for _, calls in by_leaf], part.tokens.shape[1])
            place_of.update({int(token): (batch, row, span) for row, token in enumerate(part.tokens[:, -1])})
        # Single tokens of all rows: the next step computes what these states lack when it takes them. MLX would make
        # the ones after in fresh memory, had these been evaluated for themselves.
        pending_arrays = [] if self._batch is not None else [array for batch in batches for array in batch.arrays()]
        end = 0
        for segment in self._segments:
            begin, end = end, end + segment.count
            row = (segment.job, segment.generation)
            for planned in self._step_snapshots.get(row, ()):
                flat_token = begin + planned.tokens - segment.first - 1
                batch, index, span = place_of[flat_token if flat_token in place_of else end - 1]
                if span is not None:  # drafts come after it
                    batch, index = span.compute_state([index], planned.tokens - segment.first), 0
                pending_arrays += self._make_snapshot(planned.snapshot, StatePlace(batch, index, planned.tokens))
            if segment.live:
                batch, index, span = place_of[end - 1]
                self._current_places[row] = StatePlace(batch, index, segment.first + segment.count, span)
        return pending_arrays

    def _single_token_parts(self, segments: Sequence[Segment]) -> Iterator[tuple[TokenSpan, StateBatch | None]]:
        """Yield the single tokens of a step with their states, grouped by the shapes of the states."""
        members_by_shape: dict[object, list[tuple[int, StatePlace | None]]] = {}
        for token, segment in enumerate(segments):
            if segment.count == 1:
                place = self._current_places.get((segment.job, segment.generation))
                members_by_shape.setdefault(place and place.batch.shapes, []).append((token, place))
        for members in members_by_shape.values():
            tokens = np.array([[token] for token, _ in members], np.int32)
            yield TokenSpan(tokens), _join_states([place for _, place in members if place is not None])

    def _piece_parts(self, plan: StepPlan) -> Iterator[tuple[TokenSpan, StateBatch | None]]:
        """Yield the pieces of a step with their states, cut where a state is to be kept. Rows that verify equally many
        drafts are one part, unless the step has adapters: some modules look at a piece token by token, and then all of
        it must be of one adapter.
        """
        verifying: dict[object, list[tuple[IntArray, StatePlace]]] = {}
        end = 0
        for index, segment in enumerate(plan.segments):
            begin, end = end, end + segment.count
            if segment.count == 1:
                continue
            row = (segment.job, segment.generation)
            place = self._current_places.get(row)
            if len(segment.logits) > 1 and place is not None and place.tokens:
                key = segment.count, place.batch.shapes, plan.adapters and index
                verifying.setdefault(key, []).append((np.arange(begin, end, dtype=np.int32), place))
                continue
            inner_borders = sorted(
                begin + planned.tokens - segment.first for planned in self._step_snapshots.get(row, ())
            )
            borders = [begin, *(border for border in inner_borders if border < end), end]
            for first, last in pairwise(borders):
                part = TokenSpan(np.arange(first, last, dtype=np.int32)[None], continues_previous=first > begin)
                yield part, _join_states([place]) if place is not None and first == begin else None
        for members in verifying.values():
            part = TokenSpan(np.stack([tokens for tokens, _ in members]), is_verified=True)
            yield part, _join_states([place for _, place in members])

    def _drop_rejected_drafts(self, segments: Sequence[Segment]) -> None:
        """Where the last tokens of rows were rejected drafts, compute the states after the accepted tokens. Rows in the
        same batch are computed again, too: it costs no more than a copy.
        """
        spans: dict[VerifiedSpan, dict[int, list[tuple[Row, StatePlace]]]] = {}
        for segment in segments:
            row: Row = (segment.job, segment.generation)
            place = self._current_places.get(row)
            if segment.live and place is not None and place.span is not None:
                count = place.offset_in_span(segment.first)
                spans.setdefault(place.span, {}).setdefault(count, []).append((row, place))
        for span, rows_by_count in spans.items():
            for count, members in rows_by_count.items() if rows_by_count.keys() != {span.length} else ():
                batch = span.compute_state([place.row for _, place in members], count)
                for index, (row, place) in enumerate(members):
                    self._current_places[row] = StatePlace(batch, index, place.tokens - span.length + count)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def carry_out(self, ops: StateOps) -> None:
        """Carry out what `ops` plan before a step: save snapshots, begin rows with snapshots, and drop snapshots and
        rows' states. A pipeline rank without recurrent layers does nothing: the plan is for other ranks.
        """
        if not self.leaves:
            return
        saved_arrays = [
            array for save in ops.saves for array in self._make_snapshot(save.snapshot, self._find_place(save))
        ]
        for row_snapshot in ops.begins:
            self._current_places[row_snapshot.row] = StatePlace(
                self._snapshots[row_snapshot.snapshot], 0, row_snapshot.tokens
            )
        for snapshot in ops.drops:
            self._snapshots.pop(snapshot, None)
        for row in ops.ends:
            self._current_places.pop(row, None)
        if saved_arrays:
            mx.async_eval(saved_arrays)  # type: ignore[no-untyped-call]

    def _find_place(self, save: RowSnapshot) -> StatePlace:
        """Return where the state to save is. Raises KVBlockError if it does not exist."""
        place = self._current_places.get(save.row)
        if place is not None and place.tokens == save.tokens:
            return place
        if place is not None and place.span is not None and 0 <= place.offset_in_span(save.tokens) < place.span.length:
            batch = place.span.compute_state([place.row], place.offset_in_span(save.tokens))
            return StatePlace(batch, 0, save.tokens)
        raise KVBlockError(
            f"the state of row {save.row} after {save.tokens} tokens is not there: this is a fault of the scheduler, "
            "please report it"
        )

    def _make_snapshot(self, snapshot: int, place: StatePlace) -> list[mx.array]:
        """Snapshot one row's state as a copy, and return its arrays. A slice would hold the whole batch's memory."""
        batch = self._snapshots[snapshot] = place.batch.take_rows([place.row])
        return list(batch.arrays())


def _join_states(places: Sequence[StatePlace]) -> StateBatch | None:
    """Return the states of some rows as one batch; None if there are no rows."""
    if not places:
        return None
    runs: list[tuple[StateBatch, list[int]]] = []
    for place in places:
        if not runs or runs[-1][0] is not place.batch:
            runs.append((place.batch, []))
        runs[-1][1].append(place.row)
    batches = [batch if rows == list(range(batch.rows)) else batch.take_rows(rows) for batch, rows in runs]
    return (
        batches[0]
        if len(batches) == 1
        else StateBatch(_map_slots([b.states for b in batches], mx.concatenate), len(places))
    )


def _map_slots(states: Sequence[States], make: Callable[[list[mx.array]], mx.array]) -> States:
    """Apply `make` to the arrays of each slot. A slot without arrays stays None."""
    return tuple(
        tuple(None if slots[0] is None else make(list(slots)) for slots in zip(*leaves, strict=True))
        for leaves in zip(*states, strict=True)
    )
