"""The hash over all plans."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from cortexmlx.distributed.messages import PlanDigest
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, group_layers
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams


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
    while not scheduler.is_idle:
        plan = scheduler.plan(len(in_flight))
        if plan is not None:
            in_flight.append(plan)
            made.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            done = in_flight.popleft()
            for row in scheduler.commit(done, [7] * len(done.logit_rows)):
                if row.finish_reason is not None:
                    scheduler.finish(row.job.id, row.finish_reason)
    return made


def digests(made: list[StepPlan], every: int, blocks: int = 3) -> list[bytes | None]:
    digest, found = PlanDigest(every), []
    for number, plan in enumerate(made):
        digest.add_message(b"%d" % number)
        found.append(digest.add_step(plan, (blocks,)))
    return found


@pytest.mark.parametrize("every", [1, 5])
def test_it_is_told_after_every_so_many_steps(every: int) -> None:
    made = plans([20, 9], pipeline=True)
    found = digests(made, every)
    assert found == digests(made, every) and len(made) > 10
    assert [digest is not None for digest in found] == [number % every == 0 for number in range(1, len(made) + 1)]


def test_it_depends_on_plans_tables_in_force_and_sizes() -> None:
    made = plans([20, 9], pipeline=True)
    last = digests(made, len(made))[-1]
    first = next(i for i, plan in enumerate(made) if plan.column == 1)
    groups = tuple(replace(group, lengths=group.lengths + 1) for group in made[first - 1].groups or ())
    tables = [*made[: first - 1], replace(made[first - 1], groups=groups), *made[first:]]
    assert digests(tables, first + 1)[first] != digests(made, first + 1)[first], "a window's tables are in force in it"
    assert digests([*made[:-1], replace(made[-1], column=9)], len(made))[-1] != last
    assert digests(made, len(made), blocks=4)[-1] != last
