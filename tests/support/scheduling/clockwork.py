"""A scheduler on a machine whose steps take as long as a test says."""

from __future__ import annotations

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.sampling_params import SamplingParams
from support.scheduling.requests import add, commit

LAYER = LayerGroup(KVSpec(1, 4, 4, "float32"), (0,))


class Clockwork:
    """A scheduler on a machine whose steps take exactly `cost` seconds per token."""

    def __init__(
        self,
        cost: float,
        max_rows: int = 16,
        target: float | None = 0.1,
        budget: int = 512,
        lone_budget: int = 0,
    ) -> None:
        self.now = 0.0
        self.cost = cost
        config = SchedulerConfig(
            max_rows=max_rows,
            prefill_budget=budget,
            lone_prefill_budget=lone_budget,
            context_length=1 << 20,
            token_target=target,
            share_prefixes=False,
        )
        self.scheduler = Scheduler(KVCache(BlockPools([LAYER], 4096, 16)), config, clock=lambda: self.now)
        self.plans: list[tuple[StepPlan, float]] = []
        self.first: dict[int, float] = {}

    def add(self, request: int, prompt: int, tokens: int = 1000, priority: int = 0, background: bool = False) -> Job:
        params = SamplingParams(max_tokens=tokens, priority=priority)
        return add(self.scheduler, request, [1] * prompt, params, background=background)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.scheduler.plan(0)
            assert plan is not None
            seconds = self.cost * len(plan.positions)
            self.now += seconds
            self.plans.append((plan, seconds))
            for row in commit(self.scheduler, plan, [5] * len(plan.logit_rows), seconds):
                if row.tokens:
                    self.first.setdefault(row.job.id, self.now)

    def until_first(self, request: int) -> float:
        while request not in self.first:
            self.step()
        return self.first[request]
