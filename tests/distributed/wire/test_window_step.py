"""A step of a window by what differs from the one before: the whole plan comes back, or the whole plan is sent."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.distributed.wire.messages import WindowStep, window_step
from cortexmlx.errors import HostLost
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.snapshots import StateOps
from cortexmlx.kv.spec import KVSpec, group_layers
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.hosts.values import same
from support.scheduling.requests import commit


def plans(lengths: list[int], pipeline: bool, rows: int = 4) -> list[StepPlan]:
    """The plans of answers of these lengths: lanes die on the way."""
    cache = KVCache(BlockPools(group_layers([KVSpec(1, 8, 8, "float16")]), 256, 8))
    config = SchedulerConfig(max_rows=rows, prefill_budget=16, context_length=512, pipeline=pipeline)
    scheduler = Scheduler(cache, config)
    for number, length in enumerate(lengths):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        scheduler.add(JobId(number), QueuedRequest(tuple(range(5 + number)), params), frozenset())
    made: list[StepPlan] = []
    in_flight: deque[StepPlan] = deque()
    while not scheduler.idle:
        plan = scheduler.plan(len(in_flight))
        if plan is not None:
            in_flight.append(plan)
            made.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            done = in_flight.popleft()
            commit(scheduler, done, [7] * len(done.logit_rows))
    return made


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.booleans())
def test_the_steps_of_a_window_come_back(lengths: list[int], pipeline: bool) -> None:
    made = plans(lengths, pipeline)
    for before, plan in pairwise(made):
        step = window_step(before, plan)
        assert (step is not None) is (plan.kind is StepKind.DECODE and plan.groups is None)
        if step is not None:
            assert same(step.after(before), plan)


def test_lanes_die_on_the_way() -> None:
    made = plans([20, 9, 17], pipeline=True)
    assert any(not segment.live for plan in made for segment in plan.segments)


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 99},
        {"column": 5},
        {"blocks": (1,)},
        {"source": np.zeros(3, np.int32)},
        {"positions": np.zeros(3, np.int32)},
        {"token_index": np.full(3, 9, np.int32)},
        {"logit_rows": np.zeros(3, np.int32)},
        {"segments": ()},
        {"kind": StepKind.FLUSH},
    ],
)
def test_a_plan_that_does_not_follow_is_sent_whole(change: dict[str, object]) -> None:
    made = plans([20, 20, 20], pipeline=True)
    index = next(i for i, plan in enumerate(made) if plan.column == 2)
    assert window_step(made[index - 1], made[index]) is not None
    assert window_step(made[index - 1], replace(made[index], **change)) is None  # type: ignore[arg-type]
    assert window_step(None, made[index]) is None


def test_a_step_that_cannot_follow_is_refused() -> None:
    made = plans([20, 20, 20], pipeline=True)
    decode = next(plan for plan in made if plan.kind is StepKind.DECODE)
    mixed = next(plan for plan in made if plan.kind is StepKind.MIXED)
    for before, live in ((decode, b"\xff\xff"), (decode, b""), (mixed, b"\xff")):
        with pytest.raises(HostLost, match="cannot be read"):
            WindowStep(9, live, None, StateOps()).after(before)
