"""Prompts that wait for the tier below: they let others pass, wait once, and begin with what was found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cortexmlx.kv.blocks.pools import BlockPools
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.disk_tier import DiskLoad, DiskTier
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.request import FinishReason, RequestState
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.scheduling.config import SchedulerConfig
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.scheduler import Scheduler
from support.scheduling.requests import add

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))
PIECE: Any = SimpleNamespace(arrays=())


class Below:
    """A scheduler above a tier that answers when the test says so."""

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

    def answer(self, load: DiskLoad, blocks: int | None = None) -> None:
        """All pieces of the first blocks are found."""
        keys = list(load.wanted())
        self.scheduler.arrived(load, dict.fromkeys(keys if blocks is None else keys[:blocks], PIECE))

    def step(self) -> Any:
        plan = self.scheduler.plan(0)
        if plan is not None:
            self.scheduler.commit(plan, [5] * len(plan.logit_segments))
        self.scheduler.check_invariants()
        return plan


def test_a_prompt_begins_behind_what_was_found_and_the_plan_says_what_to_load() -> None:
    below = Below()
    job = below.ask(50)
    assert below.step() is None and below.scheduler.idle and job.state is RequestState.WAITING
    below.answer(below.requested[0])
    assert not below.scheduler.idle
    plan = below.step()
    assert [load.group for load in plan.loads] == [0] * 6 and plan.positions.tolist() == [48, 49]
    table = below.cache.tables.block_table(job.id, 0).tolist()
    assert [load.target for load in plan.loads] == table[:6] and job.cached == 48
    assert below.step().loads == ()
    assert len(below.requested) == 1


def test_what_was_not_found_is_computed_and_not_asked_for_again() -> None:
    below = Below()
    jobs = [below.ask(50), below.ask(50, text=2)]
    below.step()
    below.answer(below.requested[0], blocks=0)
    below.answer(below.requested[1], blocks=2)
    plan = below.step()
    assert len(plan.loads) == 2 and [job.cached for job in jobs] == [0, 16] and len(below.requested) == 2


def test_others_go_on_while_a_prompt_waits() -> None:
    below = Below()
    waits, short = below.ask(50), below.ask(5)
    plan = below.step()
    assert [s.job for s in plan.segments] == [short.id] and not waits.running


def test_who_begins_alike_waits_for_one_reading() -> None:
    below = Below()
    jobs = [below.ask(50) for _ in range(3)]
    below.step()
    assert len(below.requested) == 1
    below.answer(below.requested[0])
    plan = below.step()
    assert len(plan.loads) == 6 and [job.cached for job in jobs] == [48, 48, 48]


def test_who_waits_for_a_reading_of_one_that_is_gone_asks_itself() -> None:
    below = Below()
    first, second = below.ask(50), below.ask(50)
    below.step()
    below.scheduler.finish(first.id, FinishReason.CANCELLED, RequestState.CANCELLED)
    assert below.step() is None and len(below.requested) == 2
    below.answer(below.requested[0])
    assert not second.running, "that one is forgotten"
    below.answer(below.requested[1])
    assert len(below.step().loads) == 6


def test_few_are_read_at_once_and_the_others_come_in_turn() -> None:
    below = Below(max_rows=16)
    jobs = [below.ask(50, text=n) for n in range(10)]
    below.step()
    assert len(below.requested) == 2
    while any(not job.running for job in jobs if job.finish_reason is None):
        for load in below.requested:
            below.answer(load)
        below.step()
    assert len(below.requested) == 10 and all(job.cached == 48 for job in jobs)


def test_a_job_for_which_there_is_no_room_asks_when_its_turn_comes() -> None:
    below = Below(max_rows=1)
    below.ask(5)
    below.ask(50)
    below.step()
    assert below.requested == []


def test_after_a_failed_step_nothing_is_waited_for() -> None:
    below = Below()
    below.ask(50)
    below.step()
    below.scheduler.fail_all()
    below.answer(below.requested[0])
    assert below.scheduler.idle and not below.scheduler.jobs
    below.ask(50)
    assert below.step() is None and len(below.requested) == 2
