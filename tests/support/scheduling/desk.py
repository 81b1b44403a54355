"""A scheduler whose results come at once, for tests of who begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.fair_share import FairShare
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import add, commit

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))


class Desk:
    """A scheduler whose results come at once."""

    def __init__(self, blocks: int = 1 << 16, *, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        self.cache = KVCache(BlockPools([LAYER], blocks, 8))
        defaults = {"max_rows": 16, "prefill_budget": 512, "context_length": 1 << 20}
        self.scheduler = Scheduler(self.cache, SchedulerConfig(**(defaults | settings)), clock)
        self.asked = 0

    @property
    def turns(self) -> FairShare:
        return self.scheduler._admission._shares

    def tokens(self, client: str | None) -> int:
        """What a client has had."""
        return self.turns.tokens(client)

    def ask(
        self,
        prompt: list[int],
        client: str | None = None,
        fork_of: Job | None = None,
        max_tokens: int | None = 40,
        priority: int = 0,
    ) -> Job:
        self.asked += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, priority=priority)
        return add(self.scheduler, self.asked, prompt, params, fork_of=fork_of, client=client)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.scheduler.plan(0)
            if plan is not None:
                commit(self.scheduler, plan, [5] * len(plan.logit_segments))

    def drain(self) -> None:
        """Steps until everything has ended."""
        while not self.scheduler.is_idle:
            self.step()

    def cancel(self, job: Job) -> None:
        self.scheduler.finish(job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
