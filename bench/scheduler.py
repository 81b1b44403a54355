"""What scheduling costs: `Scheduler.plan` and `commit` with no model. Run it: `python -m cortexmlx.bench.scheduler`."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.spec import KVSpec, LayerGroup
from cortexmlx.plan import StepKind, StepPlan
from cortexmlx.request import SamplingParams
from cortexmlx.scheduler import Scheduler

_PROMPT = 512
_STEPS = 320


@dataclass(frozen=True)
class SchedulerCost:
    """Milliseconds of host time per decode step: the median, the mean (which has the drains), and the longest."""

    rows: int
    median_ms: float
    mean_ms: float
    longest_ms: float


def measure(rows: int, blocks: int = 4096, block_size: int = 32) -> SchedulerCost:
    """Decode `_STEPS` steps of `rows` rows, pipelined one ahead, each with a prompt of `_PROMPT` tokens of its own."""
    group = LayerGroup(KVSpec(kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16"), tuple(range(32)))
    cache = KVCache([group], blocks, block_size)
    scheduler = Scheduler(cache, max_rows=rows, prefill_budget=rows * _PROMPT, context_length=1 << 20)
    for row in range(rows):
        prompt = [row, *range(1, _PROMPT)]
        scheduler.add(row, prompt, SamplingParams(max_tokens=_STEPS), seed=0, stop_ids=frozenset())
    in_flight: deque[StepPlan] = deque()
    costs = []
    while not scheduler.idle:
        started = time.perf_counter()
        plan = scheduler.plan(len(in_flight))
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            done = in_flight.popleft()
            scheduler.commit(done, [7] * len(done.sampled))
        if plan is None or plan.kind is StepKind.DECODE:
            costs.append((time.perf_counter() - started) * 1e3)
    return SchedulerCost(rows, statistics.median(costs), statistics.mean(costs), max(costs))


def report() -> str:
    """The table, as Markdown."""
    lines = ["| rows | median ms/step | mean ms/step | longest ms |", "|---:|---:|---:|---:|"]
    for rows in (1, 16, 64):
        cost = measure(rows)
        lines.append(f"| {rows} | {cost.median_ms:.3f} | {cost.mean_ms:.3f} | {cost.longest_ms:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
