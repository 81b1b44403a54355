"""Rows that lose their blocks: whose turn it is, and that everybody's turn comes."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.sampling_params import SamplingParams
from support.models.tiny import tokens_of
from support.scheduling.requests import add
from support.scheduling.shadow import Shadow
from support.scheduling.stories import Story

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
VOCAB = 50


class Crowd:
    """A scheduler with a fake model, and requests that are watched."""

    def __init__(self, blocks: int, max_rows: int, **settings: Any) -> None:
        self.now = 0.0
        cache = KVCache(BlockPools([LAYER], blocks, 4))
        config = SchedulerConfig(max_rows=max_rows, prefill_budget=32, context_length=1 << 20, **settings)
        self.scheduler = Scheduler(cache, config, clock=lambda: self.now)
        self.shadow = Shadow(self.scheduler, VOCAB)
        self.jobs: list[Job] = []

    def add(self, prompt: list[int], tokens: int, priority: int = 0, **sampling: Any) -> Job:
        self.now += 0.01
        params = SamplingParams(max_tokens=tokens, priority=priority, **sampling)
        job = add(self.scheduler, len(self.jobs), prompt, params, len(self.jobs))
        self.shadow.stories[job.id] = Story(job, VOCAB)
        self.jobs.append(job)
        return job

    def step(self) -> None:
        self.shadow.step()
        self.scheduler.cache.check_invariants()


def prompt_of(length: int, seed: int) -> list[int]:
    return [t % VOCAB for t in tokens_of(length, seed)]


@pytest.mark.parametrize("headroom", [0, 128])
def test_the_oldest_is_never_preempted_and_the_youngest_goes_first(headroom: int) -> None:
    crowd = Crowd(blocks=20, max_rows=4, headroom=headroom)
    for i in range(4):
        crowd.add(prompt_of(8, i), 60)
    while not all(job.finish_reason for job in crowd.jobs):
        before = [job.preemptions for job in crowd.jobs]
        running = [job for job in crowd.jobs if job.is_running]
        crowd.step()
        lost = [job for job, n in zip(crowd.jobs, before, strict=True) if job.preemptions > n]
        stayed = [job for job in running if job not in lost and job.is_running]
        assert all(a.order < b.order for a in stayed for b in lost if b in running)
    assert crowd.scheduler.preemptions > 0 and crowd.jobs[0].preemptions == 0
    assert [len(j.output) for j in crowd.jobs] == [60] * 4


def test_no_token_of_a_row_that_looks_back_is_chosen_twice() -> None:
    """A row is not preempted while its newest token is on its way: that would be thrown away, and chosen again. What
    chooses it, a processor of the caller's own perhaps, sees every token once.
    """
    crowd = Crowd(blocks=20, max_rows=2, headroom=0)
    plan = crowd.scheduler.plan
    places: dict[int, list[int]] = {0: [], 1: []}

    def noting(in_flight: int) -> StepPlan | None:
        step = plan(in_flight)
        for segment, place in zip(step.logit_segments, step.token_index, strict=True) if step is not None else ():
            if segment.live:
                places[segment.job].append(int(place))
        return step

    crowd.scheduler.plan = noting  # type: ignore[method-assign]
    for i, (length, tokens) in enumerate([(4, 40), (18, 39)]):
        crowd.add(prompt_of(length, i), tokens, presence_penalty=0.5)
        crowd.step()
        crowd.step()
    while not all(job.finish_reason for job in crowd.jobs):
        crowd.step()
    assert crowd.scheduler.preemptions > 0
    assert places == {0: list(range(40)), 1: list(range(39))}


def test_low_priority_goes_before_youth() -> None:
    crowd = Crowd(blocks=14, max_rows=3, headroom=0)
    low, first, second = crowd.add(prompt_of(8, 1), 30, -5), crowd.add(prompt_of(8, 2), 30), crowd.add([1] * 8, 30)
    while not first.finish_reason:
        crowd.step()
    assert low.preemptions > 0 == first.preemptions and low.preemptions >= second.preemptions


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    """Whoever came first is admitted first, however well the others would fit."""
    crowd = Crowd(blocks=24, max_rows=4, headroom=0)
    for i in range(4):
        crowd.add(prompt_of(10, i), 20)
    crowd.step()
    long = crowd.add(prompt_of(85, 99), 5)
    steps = 0
    while not long.num_generated:
        crowd.add(prompt_of(6, steps), 6)
        crowd.step()
        steps += 1
        assert steps < 100, "four short answers and one long prompt take fewer steps than this"
    crowd.shadow.finish(20_000)
    assert all(job.finish_reason for job in crowd.jobs)
