"""States are immutable: batches are used as they are where they can be, and a snapshot is a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import KVBlockError
from cortexmlx.execution.states import StateStore
from cortexmlx.kv.snapshots import NO_STATE_OPS, RowSnapshot, StateOps
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan

EMPTY = np.zeros(0, np.int32)
WIDTH = 3


def plan_of(
    kind: StepKind, *segments: tuple[int, int, int], states: StateOps = NO_STATE_OPS, first: bool = True
) -> StepPlan:
    """A step of segments (job, first token, tokens); those of job -1 are dead lanes."""
    made = tuple(
        Segment(JobId(abs(job)), 0, begin, count, range(begin + count - 1, begin + count), live=job > 0)
        for job, begin, count in segments
    )
    groups = () if first else None
    steps = (kind, made, EMPTY, None, EMPTY, EMPTY, made, EMPTY, None)
    return StepPlan(0, *steps, groups, (), 0, 16, (), None, states=states)


class Rows:
    """A store, and a model whose state says which tokens a row has had: their sum, in each of WIDTH numbers."""

    def __init__(self) -> None:
        self.store = StateStore({4: 1})

    def step(self, plan: StepPlan, values: Sequence[float]) -> list[float]:
        """The states that the tokens find, by flat token."""
        self.store.begin_step(plan)
        leaf = self.store.leaves[4]
        assert leaf.step is not None
        found = np.zeros(len(values))
        for index, (part, cache) in enumerate(zip(leaf.step.parts, leaf.caches, strict=True)):
            if part.continues_previous:
                cache[0] = leaf.caches[index - 1][0]
            rows = len(part.tokens)
            before = mx.zeros((rows, WIDTH)) if cache[0] is None else cache[0]
            assert before.shape == (rows, WIDTH)
            mine = np.array(values)[part.tokens]
            found[part.tokens[:, 0]] = np.array(before)[:, 0]
            cache[0] = before + mx.array(mine.sum(axis=1, keepdims=True).astype(np.float32))
        mx.eval(self.store.end_step())
        return found.tolist()

    def batch(self, job: int) -> Any:
        return self.store._current_places[job, 0].batch


def test_nobody_holds_what_a_step_begins_with() -> None:
    """MLX makes a row's next state in the memory of the last one only then."""
    rows = Rows()
    rows.step(plan_of(StepKind.MIXED, (2, 0, 1), (1, 0, 2)), [3, 1, 2])
    for first in (True, False):
        begun = plan_of(StepKind.DECODE, (2, 1, 1), (1, 2, 1), first=first)
        rows.store.begin_step(begun)
        assert not rows.store.arrays()
        for cache in rows.store.leaves[4].caches:
            cache[0] = cache[0] + 1
        rows.store.end_step()
        assert rows.store.arrays()


def test_what_the_next_step_takes_as_it_is_is_not_evaluated_for_itself() -> None:
    """MLX would make the state after it in fresh memory. What a piece has left, whatever it was made of goes."""
    store = StateStore({4: 1})

    def evaluated(plan: StepPlan) -> int:
        store.begin_step(plan)
        for cache in store.leaves[4].caches:
            cache[0] = mx.zeros((1, WIDTH)) if cache[0] is None else cache[0] + 1
        return len(store.end_step())

    assert evaluated(plan_of(StepKind.MIXED, (1, 0, 3))) == 1
    assert evaluated(plan_of(StepKind.DECODE, (1, 3, 1))) == 0
    assert evaluated(plan_of(StepKind.DECODE, (1, 4, 1), first=False)) == 0
    cut = StateOps(step_snapshots=(RowSnapshot((1, 0), 6, 7),))
    assert evaluated(plan_of(StepKind.DECODE, (1, 5, 1), states=cut, first=False)) == 1, "the snapshot"


def test_rows_find_their_own_states_however_they_are_computed() -> None:
    rows = Rows()
    assert rows.step(plan_of(StepKind.MIXED, (1, 0, 1), (2, 0, 2), (3, 0, 3)), [1, 2, 3, 4, 5, 6])[:2] == [0, 0]
    assert rows.step(plan_of(StepKind.DECODE, (3, 3, 1), (1, 1, 1), (2, 2, 1)), [1, 1, 1]) == [15, 1, 5]
    assert rows.step(plan_of(StepKind.DECODE, (3, 4, 1), (1, 2, 1), (2, 3, 1), first=False), [1, 1, 1]) == [16, 2, 6]
    found = rows.step(plan_of(StepKind.MIXED, (2, 4, 1), (4, 0, 1), (3, 5, 1), (1, 3, 2)), [0, 9, 0, 7, 7])
    assert found[:4] == [7, 0, 17, 3], "one of the single tokens begins"
    assert rows.step(plan_of(StepKind.DECODE, (1, 5, 1), (2, 5, 1), (3, 6, 1), (4, 1, 1)), [0] * 4) == [17, 7, 17, 9]


def test_a_window_goes_on_with_its_batch() -> None:
    rows = Rows()
    rows.step(plan_of(StepKind.DECODE, (1, 0, 1), (2, 0, 1)), [1, 2])
    before = rows.batch(1)
    rows.store.begin_step(plan_of(StepKind.DECODE, (1, 1, 1), (2, 1, 1), first=False))
    assert rows.store.leaves[4].caches[0][0] is before.states[0][0], "no copy"
    rows.store.end_step()
    rows.store.begin_step(plan_of(StepKind.DECODE, (1, 1, 1), (2, 1, 1)))
    assert rows.store.leaves[4].caches[0][0] is before.states[0][0], "a new window of the same rows"


def test_the_state_after_a_rows_last_step_can_be_kept_and_no_other() -> None:
    rows = Rows()
    rows.step(plan_of(StepKind.DECODE, (1, 0, 1), (2, 0, 1)), [1, 2])
    rows.step(plan_of(StepKind.DECODE, (1, 1, 1), (2, 1, 1), first=False), [10, 20])
    rows.step(plan_of(StepKind.DECODE, (-1, 0, 1), (2, 2, 1), first=False), [100, 200])
    saves = (RowSnapshot((1, 0), 2, 7), RowSnapshot((2, 0), 3, 8))
    begins = (RowSnapshot((5, 0), 2, 7), RowSnapshot((6, 0), 3, 8))
    found = rows.step(plan_of(StepKind.DECODE, (5, 2, 1), (6, 3, 1), states=StateOps(saves, begins)), [0, 0])
    assert found == [11, 222], "a dead lane's step is not the row's"
    with pytest.raises(KVBlockError, match=r"row \(2, 0\) after 2 tokens is not there"):
        rows.store.carry_out(StateOps((RowSnapshot((2, 0), 2, 9),)))
    rows.store.carry_out(StateOps(drops=(7,), ends=((1, 0), (2, 0), (5, 0), (6, 0))))
    assert rows.store.nbytes == WIDTH * 4, "one snapshot is left"
    rows.store.forget()
    assert rows.store.nbytes == 0


def test_a_piece_is_cut_where_its_state_is_to_be_kept() -> None:
    rows = Rows()
    cuts = (*(RowSnapshot((1, 0), place, place) for place in (2, 4, 5)), RowSnapshot((2, 0), 1, 9))
    rows.step(plan_of(StepKind.MIXED, (2, 0, 1), (1, 0, 5), states=StateOps(step_snapshots=cuts)), [50, 1, 2, 3, 4, 5])
    ops = StateOps(begins=tuple(RowSnapshot((10 + place, 0), place, place) for place in (2, 4, 5, 9)))
    plan = plan_of(StepKind.DECODE, (12, 2, 1), (14, 4, 1), (15, 5, 1), (19, 1, 1), states=ops)
    assert rows.step(plan, [0] * 4) == [3, 10, 15, 50]


def test_a_snapshot_does_not_hold_what_it_was_a_part_of() -> None:
    rows = Rows()
    many = [(job, 0, 1) for job in range(1, 65)]
    rows.step(plan_of(StepKind.DECODE, *many), [1.0] * 64)
    rows.store.carry_out(StateOps((RowSnapshot((3, 0), 1, 1),), ends=tuple((job, 0) for job, _, _ in many)))
    mx.eval(rows.store.arrays())
    before = mx.get_active_memory()
    rows.store.forget_rows()
    assert rows.store.nbytes == WIDTH * 4 and mx.get_active_memory() <= before
    (snapshot,) = rows.store._snapshots.values()
    assert [a.shape for a in snapshot.arrays()] == [(1, WIDTH)]


def test_without_recurrent_leaves_nothing_happens() -> None:
    store = StateStore({})
    store.begin_step(plan_of(StepKind.DECODE, (1, 0, 1)))
    assert store.end_step() == [] == store.arrays()


def test_a_part_without_recurrent_layers_has_every_snapshot_without_arrays() -> None:
    """Its rank is not to be the one that lacks what other ranks keep, and it keeps nothing of what comes back."""
    store = StateStore({})
    batch = store.snapshot(7)
    assert batch is not None and list(batch.arrays()) == []
    store.restore(7, [])
    assert not store._snapshots
    full = StateStore({4: 1})
    assert full.snapshot(7) is None
