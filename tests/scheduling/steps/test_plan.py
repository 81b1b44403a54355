"""What is read off a plan: which logits are needed, and which writes one slice takes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.steps.plan import SCRATCH_SLOT, ArenaWrite, Segment, StepKind, StepPlan

EMPTY = np.zeros(0, np.int32)


def plan_of(segments: list[Segment]) -> StepPlan:
    return StepPlan(1, StepKind.MIXED, tuple(segments), EMPTY, None, EMPTY, EMPTY, None, (), 0, 4, None)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=8))
def test_logits_are_those_of_the_last_token_of_each_segment_that_needs_them(shape: list[tuple[int, bool]]) -> None:
    plan = plan_of([Segment(JobId(i), 0, 0, count, needs) for i, (count, needs) in enumerate(shape)])
    owners = [(i, place == count - 1) for i, (count, _) in enumerate(shape) for place in range(count)]
    wanted = [flat for flat, (i, last) in enumerate(owners) if last and shape[i][1]]
    assert plan.logit_rows.tolist() == wanted and plan.logit_rows.dtype == np.int32
    assert [s.job for s in plan.logit_segments] == [owners[flat][0] for flat in wanted]


@pytest.mark.parametrize(
    ("slots", "zeros", "run"),
    [
        ([5, 6, 7], [8, 9], 5),
        ([5], [], 5),
        ([5, 6], [8], None),
        ([5, 7], [], None),
        ([6, 5], [], None),
        ([SCRATCH_SLOT, 0, 1], [], None),
        ([], [], None),
    ],
)
def test_a_write_is_one_run_only_if_all_its_slots_follow_each_other(
    slots: list[int], zeros: list[int], run: int | None
) -> None:
    assert ArenaWrite(np.array(slots, np.int32), np.array(zeros, np.int32)).run == run
