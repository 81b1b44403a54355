"""Measures the scheduler's cost per step, without a model: `python -m cortexmlx.bench.studies.scheduler`.

Rows decode one step ahead of what is committed, as in the engine. A step's cost is its `plan` and its `commit`. It must
not grow with the size of the pool or of the prefix cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import DEFAULT_BLOCK_SIZE, KVSpec, group_layers
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams

ROWS = (1, 16, 64)
POOLS = ((4_096, 0), (1_000_000, 100_000))
"""Blocks of the pool, and cached blocks that no request uses."""
CONTEXT = 512
STEPS = 512


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of the scheduler's `plan` and `commit` together, for each decode step."""

    rows: int
    blocks: int
    cached_blocks: int
    milliseconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean milliseconds of all steps, including those that flush the tail or admit a request."""
        return statistics.fmean(self.milliseconds)

    @property
    def median(self) -> float:
        """Median milliseconds: a step inside a decode window."""
        return statistics.median(self.milliseconds)

    @property
    def p99(self) -> float:
        """The 99th percentile in milliseconds: a step that flushes the tail and opens a decode window."""
        return sorted(self.milliseconds)[int(len(self.milliseconds) * 0.99)]


def measure_steps(rows: int, blocks: int, cached: int, steps: int = STEPS) -> StepCost:
    """Decode `steps` tokens with `rows` rows in a pool of `blocks` blocks, of which `cached` hold unused prefixes."""
    groups = group_layers([KVSpec(8, 128, 128, "float16")])
    cache = KVCache(BlockPools(groups, blocks, DEFAULT_BLOCK_SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(max_rows=rows, prefill_budget=512, context_length=1 << 20))
    random = np.random.default_rng(0)
    prompt_length = min(100, max(1, cached)) * DEFAULT_BLOCK_SIZE
    filled_blocks = 0
    while filled_blocks < cached:
        _add_request(scheduler, -1 - filled_blocks, random, prompt_length, 1)
        _run_to_end(scheduler)
        filled_blocks += prompt_length // DEFAULT_BLOCK_SIZE
    for row in range(rows):
        _add_request(scheduler, 1 + row, random, CONTEXT, steps)
    return StepCost(rows, blocks, cached, tuple(_run_to_end(scheduler)))


def _add_request(scheduler: Scheduler, request: int, random: np.random.Generator, prompt: int, tokens: int) -> None:
    """Add a request with a random prompt to the scheduler."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ids = tuple(random.integers(0, 50_000, prompt).tolist())
    scheduler.add(JobId(request), QueuedRequest(ids, params), frozenset())


def _run_to_end(scheduler: Scheduler) -> list[float]:
    """Plan and commit until nothing is left. Return the milliseconds of each step in which all rows decode."""
    in_flight: deque[StepPlan] = deque()
    costs: list[float] = []
    spent_seconds, tokens = 0.0, [7] * scheduler.config.max_rows
    while not scheduler.is_idle:
        started = time.perf_counter()
        plan = scheduler.plan(len(in_flight))
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            oldest_plan = in_flight.popleft()
            for row in scheduler.commit(oldest_plan, tokens[: len(oldest_plan.logit_segments)]):
                if row.finish_reason is not None:
                    scheduler.finish(row.job.id, row.finish_reason)
        spent_seconds += time.perf_counter() - started
        if plan is not None:
            if len(plan.logit_segments) == scheduler.config.max_rows == len(plan.positions):
                costs.append(1_000 * spent_seconds)
            spent_seconds = 0.0
    return costs


def report(costs: Sequence[StepCost]) -> str:
    """Return the costs of a step as a Markdown table."""
    lines = [
        f"plan and commit of a decode step, milliseconds, {STEPS} steps from a context of {CONTEXT} tokens:",
        "",
        "| rows | blocks | cached | median | mean | p99 |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for c in costs:
        figures = f"{c.median:.3f} | {c.mean:.3f} | {c.p99:.3f}"
        lines.append(f"| {c.rows} | {c.blocks:,} | {c.cached_blocks:,} | {figures} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.scheduler", description=measure_steps.__doc__
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"decode steps (default {STEPS})")
    steps = parser.parse_args(argv).steps
    print(report([measure_steps(rows, blocks, cached, steps) for blocks, cached in POOLS for rows in ROWS]))


if __name__ == "__main__":
    main()
