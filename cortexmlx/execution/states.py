"""The states of recurrent layers: each row's state after its tokens so far, and snapshots of some states.

All arrays here are immutable: a step makes new ones, so nothing waits for a step to be drained. Rows that are computed
together have their states in one batch. If the next step has the same rows, it takes the batch unchanged, as it does
within a decode window. When a token turns out to be an answer's last, it is already in the row's state, since the next
step is on its way; or it never will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import mlx.core as mx
import numpy as np

from cortexmlx.attention.recurrent import StateLeaf, StateStep, TokenSpan
from cortexmlx.errors import KVBlockError
from cortexmlx.kv.snapshots import Row, Save, StateOps
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan

States = tuple[tuple[mx.array | None, ...], ...]
"""The arrays of some rows `[rows, ...]`, for each leaf and each of its slots; None if nothing was written there."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The states of `rows` rows."""

    states: States
    rows: int

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes without the rows. Only states of equal shapes are computed together."""
        return tuple(None if a is None else a.shape[1:] for leaf in self.states for a in leaf)

    def arrays(self) -> Iterator[mx.array]:
        return (a for leaf in self.states for a in leaf if a is not None)

    def taken(self, rows: Sequence[int]) -> Batch:
        """Return a copy of some rows."""
        index = mx.array(list(rows), mx.int32)
        return Batch(_each([self.states], lambda arrays: mx.take(arrays[0], index, axis=0)), len(rows))


@dataclass(frozen=True)
class StateSlot:
    """Where the state of a row after `tokens` tokens is."""

    batch: Batch
    row: int
    tokens: int


class StateStore:
    """Rows' states and snapshots. `sizes` are the numbers of slots, by leaf of the model. The model gets `leaves` in
    their place. Each leaf passes its module's inputs to `feed`.
    """

    def __init__(self, sizes: Mapping[int, int], feed: Callable[..., None] = lambda *_: None) -> None:
        self.leaves = {leaf: StateLeaf(size, feed) for leaf, size in sizes.items()}
        self._empty = tuple((None,) * size for size in sizes.values())
        self._snapshots: dict[int, Batch] = {}
        self.forget_rows()

    def forget_rows(self) -> None:
        """Drop the rows' states, but not the snapshots."""
        self._newest: dict[Row, StateSlot] = {}
        self._step: StateStep | None = None
        self._batch: Batch | None = None
        self._segments: tuple[Segment, ...] = ()
        self._cuts: dict[Row, list[Save]] = {}
        for leaf in self.leaves.values():
            leaf.end()

    def forget(self) -> None:
        """Drop all states and snapshots."""
        self.forget_rows()
        self._snapshots.clear()

    @property
    def step(self) -> StateStep | None:
        """How the tokens of the step are cut into parts; None without recurrent layers."""
        return self._step if self.leaves else None

    def snapshot(self, name: int) -> Batch | None:
        """Return the state of a snapshot; None if it does not exist. A part without recurrent layers has all of them,
        without arrays.
        """
        return self._snapshots.get(name) if self.leaves else Batch((), 1)

    def restore(self, name: int, arrays: Sequence[mx.array | None]) -> None:
        """Make a snapshot of its arrays `[1, ...]`, one for each slot of each leaf in order, with None for an empty
        slot.
        """
        if not self.leaves:
            return
        rest = iter(arrays)
        self._snapshots[name] = Batch(tuple(tuple(next(rest) for _ in leaf) for leaf in self._empty), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all states and snapshots."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Return all states, for evaluation."""
        batches = {id(b): b for b in (*(p.batch for p in self._newest.values()), *self._snapshots.values())}
        return [array for batch in batches.values() for array in batch.arrays()]

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Give the leaves the states with which a step begins. Raises KVBlockError for a state that does not exist."""
        self.carry_out(plan.states)
        self._cuts = {}
        for cut in plan.states.cuts:
            self._cuts.setdefault(cut.row, []).append(cut)
        if plan.kind is not StepKind.DECODE or plan.groups is not None or self._batch is None:
            parts = [*self._singles(plan.segments), *self._pieces(plan.segments)]
            self._step = StateStep([part for part, _ in parts])
            states = [batch.states if batch is not None else self._empty for _, batch in parts]
        else:
            states = [self._batch.states]
        assert self._step is not None
        self._segments = plan.segments
        for index, leaf in enumerate(self.leaves.values()):
            leaf.begin(self._step, (state[index] for state in states))
        # Nobody else may hold what the step begins with: then MLX makes the next state in its memory.
        self._batch = None
        for segment in plan.segments:
            if segment.live:
                self._newest.pop((segment.job, segment.generation), None)

    def end(self) -> list[mx.array]:
        """Take the states that the step left in the leaves. Return the arrays to evaluate."""
        assert self._step is not None
        by_leaf = [leaf.end() for leaf in self.leaves.values()]
        parts = self._step.parts
        after = [
            Batch(tuple(tuple(leaf[i]) for leaf in by_leaf), 1 if part.piece else len(part.tokens))
            for i, part in enumerate(parts)
        ]
        self._batch = after[0] if len(after) == 1 and not parts[0].piece else None
        place_of = {int(t): (b, row) for p, b in zip(parts, after, strict=True) for row, t in _ends(p)}
        # Single tokens of all rows: the next step computes what these states lack when it takes them. MLX would make
        # the ones after in fresh memory, had these been evaluated for themselves.
        kept = [] if self._batch is not None else [array for batch in after for array in batch.arrays()]
        end = 0
        for segment in self._segments:
            begin, end = end, end + segment.count
            row = (segment.job, segment.generation)
            for cut in self._cuts.get(row, ()):
                batch, index = place_of[begin + cut.tokens - segment.first - 1]
                kept += self._keep(cut.snapshot, StateSlot(batch, index, cut.tokens))
            if segment.live:
                self._newest[row] = StateSlot(*place_of[end - 1], segment.first + segment.count)
        return kept

    def _singles(self, segments: Sequence[Segment]) -> Iterator[tuple[TokenSpan, Batch | None]]:
        """Yield the single tokens of a step, grouped by the shapes of their states."""
        alike: dict[object, list[tuple[int, StateSlot | None]]] = {}
        for token, segment in enumerate(segments):
            if segment.count == 1:
                place = self._newest.get((segment.job, segment.generation))
                alike.setdefault(place and place.batch.shapes, []).append((token, place))
        for members in alike.values():
            tokens = np.array([token for token, _ in members], np.int32)
            yield TokenSpan(tokens, piece=False), _together([place for _, place in members if place is not None])

    def _pieces(self, segments: Sequence[Segment]) -> Iterator[tuple[TokenSpan, Batch | None]]:
        """Yield the pieces of a step, cut where a state is to be kept."""
        end = 0
        for segment in segments:
            begin, end = end, end + segment.count
            if segment.count == 1:
                continue
            row = (segment.job, segment.generation)
            inner = sorted(begin + cut.tokens - segment.first for cut in self._cuts.get(row, ()))
            borders = [begin, *(border for border in inner if border < end), end]
            place = self._newest.get(row)
            for first, last in pairwise(borders):
                part = TokenSpan(np.arange(first, last, dtype=np.int32), piece=True, goes_on=first > begin)
                yield part, _together([place]) if place is not None and first == begin else None

    # -- what is kept -------------------------------------------------------------------------------------------------

    def carry_out(self, ops: StateOps) -> None:
        """Carry out the operations that come before a step. A pipeline's part without recurrent layers has none to
        carry out: what is planned is for other ranks.
        """
        if not self.leaves:
            return
        saved = [array for save in ops.saves for array in self._keep(save.snapshot, self._place(save))]
        for begin in ops.begins:
            self._newest[begin.row] = StateSlot(self._snapshots[begin.snapshot], 0, begin.tokens)
        for snapshot in ops.drops:
            self._snapshots.pop(snapshot, None)
        for row in ops.ends:
            self._newest.pop(row, None)
        if saved:
            mx.async_eval(saved)  # type: ignore[no-untyped-call]

    def _place(self, save: Save) -> StateSlot:
        place = self._newest.get(save.row)
        if place is not None and place.tokens == save.tokens:
            return place
        raise KVBlockError(
            f"the state of row {save.row} after {save.tokens} tokens is not there: this is a fault of the scheduler, "
            "please report it"
        )

    def _keep(self, snapshot: int, place: StateSlot) -> list[mx.array]:
        """Keep a copy of one row's state. A slice would hold the memory of the whole batch."""
        batch = self._snapshots[snapshot] = place.batch.taken([place.row])
        return list(batch.arrays())


def _ends(part: TokenSpan) -> Iterator[tuple[int, int]]:
    """Yield the rows of a part's batch, each with its last flat token."""
    return enumerate(part.tokens[-1:] if part.piece else part.tokens)


def _together(places: Sequence[StateSlot]) -> Batch | None:
    """Return the states of some rows as one batch; None without rows."""
    if not places:
        return None
    runs: list[tuple[Batch, list[int]]] = []
    for place in places:
        if not runs or runs[-1][0] is not place.batch:
            runs.append((place.batch, []))
        runs[-1][1].append(place.row)
    taken = [batch if rows == list(range(batch.rows)) else batch.taken(rows) for batch, rows in runs]
    return taken[0] if len(taken) == 1 else Batch(_each([b.states for b in taken], mx.concatenate), len(places))


def _each(states: Sequence[States], make: Callable[[list[mx.array]], mx.array]) -> States:
    """Apply `make` to the arrays of each slot; None where there are none."""
    return tuple(
        tuple(None if slots[0] is None else make(list(slots)) for slots in zip(*leaves, strict=True))
        for leaves in zip(*states, strict=True)
    )
