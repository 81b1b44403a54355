"""Prompts that wait for disk loads: they let others pass, wait once, and begin with what was found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cortexmlx.disk.tier import DiskLoad, DiskTier
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import add, commit

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
PIECE: Any = SimpleNamespace(arrays=())


class DiskStage:
    """A scheduler whose disk tier answers when the test says so."""

    def __init__(self, **settings: Any) -> None:
        self.cache = KVCache(BlockPools([LAYER], 512, 8))
        self.requested: list[DiskLoad] = []
        self.cache.disk_tier = DiskTier([LAYER], 8, False, self.requested.append, b"")
        config = {"max_rows": 8, "prefill_budget": 512, "context_length": 1 << 20} | settings
        self.scheduler = Scheduler(self.cache, SchedulerConfig(**config))
        self.asked = 0

    def ask(self, tokens: int, text: int = 1) -> Job:
        self.asked += 1
        prompt = [text] * (tokens - 1) + [1000 + self.asked]
        return add(self.scheduler, self.asked, prompt, SamplingParams(max_tokens=4, ignore_eos=True))

    def fork(self, parent: Job) -> Job:
        self.asked += 1
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        return add(self.scheduler, self.asked, parent.tokens, params, fork_of=parent)

    def answer(self, load: DiskLoad, blocks: int | None = None) -> None:
        """Answer a load with its first `blocks` pieces (None: all of them)."""
        keys = list(load.requested_pieces())
        self.scheduler.accept_load(load, dict.fromkeys(keys if blocks is None else keys[:blocks], PIECE))

    def step(self) -> Any:
        plan = self.scheduler.plan(0)
        if plan is not None:
            commit(self.scheduler, plan, [5] * len(plan.logit_segments))
        self.scheduler.check_invariants()
        return plan


def test_what_was_not_found_is_computed_and_not_asked_for_again() -> None:
    stage = DiskStage()
    jobs = [stage.ask(50), stage.ask(50, text=2)]
    stage.step()
    stage.answer(stage.requested[0], blocks=0)
    stage.answer(stage.requested[1], blocks=2)
    plan = stage.step()
    assert len(plan.loads) == 2 and [job.cached for job in jobs] == [0, 16] and len(stage.requested) == 2


def test_who_waits_for_a_reading_of_one_that_is_gone_asks_itself() -> None:
    stage = DiskStage()
    first, second = stage.ask(50), stage.ask(50)
    stage.step()
    stage.scheduler.finish(first.id, FinishReason.CANCELLED, RequestState.CANCELLED)
    assert stage.step() is None and len(stage.requested) == 2
    stage.answer(stage.requested[0])
    assert not second.is_running, "that one is forgotten"
    stage.answer(stage.requested[1])
    assert len(stage.step().loads) == 6


def test_a_fork_whose_parent_is_gone_is_loaded_from_disk() -> None:
    stage = DiskStage()
    parent = stage.ask(50)
    fork = stage.fork(parent)
    stage.step()
    stage.scheduler.finish(parent.id, FinishReason.CANCELLED, RequestState.CANCELLED)
    assert stage.step() is None and len(stage.requested) == 2
    stage.answer(stage.requested[1])
    plan = stage.step()
    assert len(plan.loads) == 6 and [s.job for s in plan.segments] == [fork.id]
    assert plan.positions.tolist() == [48, 49]


def test_a_fork_takes_the_blocks_of_its_parent_and_loads_nothing() -> None:
    stage = DiskStage()
    parent = stage.ask(50)
    fork = stage.fork(parent)
    stage.step()
    stage.answer(stage.requested[0])
    stage.step()
    assert stage.step().loads == () and fork.is_running and len(stage.requested) == 1


def test_few_are_read_at_once_and_the_others_come_in_turn() -> None:
    stage = DiskStage(max_rows=16)
    jobs = [stage.ask(50, text=n) for n in range(10)]
    stage.step()
    assert len(stage.requested) == 2
    while any(not job.is_running for job in jobs if job.finish_reason is None):
        for load in stage.requested:
            stage.answer(load)
        stage.step()
    assert len(stage.requested) == 10 and all(job.cached == 48 for job in jobs)


def test_a_job_for_which_there_is_no_room_asks_when_its_turn_comes() -> None:
    stage = DiskStage(max_rows=1)
    stage.ask(5)
    stage.ask(50)
    stage.step()
    assert stage.requested == []
