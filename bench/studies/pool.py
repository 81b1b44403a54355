"""The scheduler's cost for the life of a request, in a small and in a huge pool.

`python -m cortexmlx.bench.studies.pool`.

Requests begin and end all the time. They are matched with the prefix cache, admitted, prefilled, decoded and retired.
The cost must not grow with the pool's blocks, with the cached prefixes, or with what must be evicted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from cortexmlx.bench.studies.scheduler import StepCost
from cortexmlx.kv.blocks.pools import BlockPools
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.spec import DEFAULT_BLOCK_SIZE, KVSpec, group_layers
from cortexmlx.request import QueuedRequest
from cortexmlx.sampling_params import SamplingParams
from cortexmlx.scheduling.config import SchedulerConfig
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.scheduler import Scheduler

POOLS = ((1_000, 100), (1_000_000, 100_000), (100_000, 100_000))
"""Blocks of the pool, and how many of them are cached prefixes that no request uses. The last pool has to evict."""
ROWS = 16
PROMPT = 100
ANSWER = 24
REQUESTS = 800
TEXT = 10
"""Blocks of each cached prefix."""


def measure(blocks: int, cached: int, requests: int = REQUESTS) -> StepCost:
    """Serve `requests` requests in a pool of `blocks` blocks, of which `cached` hold unused prefixes."""
    random = np.random.default_rng(0)
    cache = KVCache(BlockPools(group_layers([KVSpec(8, 128, 128, "float16")]), blocks, DEFAULT_BLOCK_SIZE))
    for text in range(cached // TEXT):
        tokens = random.integers(0, 50_000, TEXT * DEFAULT_BLOCK_SIZE).tolist()
        cache.allocate_for(-1 - text, len(tokens))
        cache.append(-1 - text, len(tokens))
        cache.release_blocks(-1 - text, tokens, len(tokens))
    scheduler = Scheduler(cache, SchedulerConfig(max_rows=ROWS, prefill_budget=512, context_length=1 << 20))
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    prompts = [random.integers(0, 50_000, PROMPT).tolist() for _ in range(requests)]
    costs: list[float] = []
    while prompts or not scheduler.idle:
        while prompts and scheduler.rows_waiting < ROWS:
            scheduler.add(JobId(len(prompts)), QueuedRequest(tuple(prompts.pop()), params), frozenset())
        started = time.perf_counter()
        plan = scheduler.plan(0)
        if plan is not None:
            scheduler.commit(plan, [7] * len(plan.logit_segments))
        costs.append(1_000 * (time.perf_counter() - started))
    return StepCost(ROWS, blocks, cached, tuple(costs))


def report(costs: Sequence[StepCost]) -> str:
    """Return the figures as a Markdown table, each pool compared with the first."""
    lines = [
        f"plan and commit of a step, milliseconds, requests of {PROMPT} + {ANSWER} tokens through {ROWS} rows:",
        "",
        "| blocks | cached | median | mean | mean beside the first |",
        "|---:|---:|---:|---:|---:|",
    ]
    for c in costs:
        ratio = c.mean / costs[0].mean
        lines.append(f"| {c.blocks:,} | {c.cached_blocks:,} | {c.median:.3f} | {c.mean:.3f} | {ratio:.2f}x |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.bench.studies.pool", description=measure.__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"requests (default {REQUESTS})")
    requests = parser.parse_args(argv).requests
    print(report([measure(blocks, cached, requests) for blocks, cached in POOLS]))


if __name__ == "__main__":
    main()
