"""Measures the cost of a call to the KV block allocator, by the size of the arena.

`python -m cortexmlx.bench.studies.allocator` prints the table; `measure_churn()` returns it as data. Only calls to the
allocator, and the loop that makes them, are timed. Drawing random numbers and filling the arena are not.
`cortexmlx bench --suite allocator` compares the allocator with others.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle

ARENA_SIZES = (1_000, 10_000, 100_000, 1_000_000)
LONGEST = 64
CALLS = 20_000


@dataclass(frozen=True)
class ChurnCost:
    """Microseconds per random `allocate` or `free` call in a half-full, fragmented arena, one figure per repeat."""

    total_blocks: int
    fragmentation: float
    repeats_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median microseconds per call."""
        return statistics.median(self.repeats_us)


@dataclass(frozen=True)
class _CallTrace:
    """Allocator calls drawn beforehand; run i is the i-th allocated run. The allocator returns the same blocks for the
    same history. So every call of a trace succeeds again in a replay.
    """

    fill: tuple[int, ...]  # lengths that fill the arena
    holes: tuple[int, ...]  # runs then freed, until half of the arena is free
    churn: tuple[int, ...]  # n > 0: allocate n blocks; otherwise free run -n


def _draw_trace(total_blocks: int, calls: int, seed: int) -> _CallTrace:
    """Draw random calls that fill an arena, fragment it, and then allocate and free."""
    rng = random.Random(seed)
    allocator = KVBlockAllocator(total_blocks)
    runs: list[KVHandle] = []
    while allocator.free_blocks:
        runs.append(allocator.allocate(min(rng.randint(1, LONGEST), allocator.largest_free_run)))
    fill = tuple(run.count for run in runs)
    live_runs = list(range(len(runs)))
    rng.shuffle(live_runs)
    holes = []
    while allocator.used_blocks > total_blocks // 2:
        holes.append(live_runs.pop())
        allocator.free(runs[holes[-1]])
    churn: list[int] = []
    while len(churn) < calls:
        n = rng.randint(1, LONGEST)
        if allocator.free_blocks > total_blocks // 2 and n <= allocator.largest_free_run:
            live_runs.append(len(runs))
            runs.append(allocator.allocate(n))
            churn.append(n)
        else:
            index = rng.randrange(len(live_runs))
            live_runs[index], live_runs[-1] = live_runs[-1], live_runs[index]
            churn.append(-live_runs.pop())
            allocator.free(runs[-churn[-1]])
    return _CallTrace(fill, tuple(holes), tuple(churn))


def _replay_trace(total_blocks: int, trace: _CallTrace) -> tuple[float, float]:
    """Return the microseconds of the trace's churn, and the fragmentation of the arena after it."""
    allocator = KVBlockAllocator(total_blocks)
    runs = [allocator.allocate(n) for n in trace.fill]
    for run in trace.holes:
        allocator.free(runs[run])
    started = time.perf_counter()
    for call in trace.churn:
        if call > 0:
            runs.append(allocator.allocate(call))
        else:
            allocator.free(runs[-call])
    return (time.perf_counter() - started) * 1e6, allocator.fragmentation()


def measure_churn(sizes: Sequence[int] = ARENA_SIZES, repeats: int = 5, calls: int = CALLS) -> tuple[ChurnCost, ...]:
    """Allocate and free runs of 1 to 64 blocks at random in half-full, fragmented arenas of these sizes (blocks).

    Best fit joins the free blocks again within a few turnovers. So every arena is filled and fragmented again after one
    call per 64 blocks, which turns over about half of it. The sizes take turns within each repeat, so that a slow phase
    of the machine affects all of them.
    """
    traces = {}
    for total in sizes:
        per_round = max(1, min(calls, total // LONGEST))
        traces[total] = [_draw_trace(total, per_round, seed) for seed in range(calls // per_round)]
    times: dict[int, list[float]] = {total: [] for total in sizes}
    fragmentation: dict[int, float] = {}
    for _ in range(repeats):
        for total in sizes:
            gc.collect()
            rounds = [_replay_trace(total, trace) for trace in traces[total]]
            times[total].append(sum(us for us, _ in rounds) / sum(len(trace.churn) for trace in traces[total]))
            fragmentation[total] = statistics.mean(end for _, end in rounds)
    return tuple(ChurnCost(total, fragmentation[total], tuple(times[total])) for total in sizes)


def report(churn: Sequence[ChurnCost]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        f"allocate or free, runs of 1 to {LONGEST} blocks, half of the arena free, median of "
        f"{len(churn[0].repeats_us)} (fastest to slowest):",
        "",
        "| blocks | fragmentation | us per call | of the smallest |",
        "|---:|---:|---:|---:|",
    ]
    for row in churn:
        lines.append(
            f"| {row.total_blocks:,} | {row.fragmentation:.3f} | {row.median_us:.2f} "
            f"({min(row.repeats_us):.2f} to {max(row.repeats_us):.2f}) | "
            f"{row.median_us / churn[0].median_us:.2f}x |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study, and print its table."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.allocator", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which the median counts (default 5)")
    print(report(measure_churn(repeats=parser.parse_args(argv).repeats)))


if __name__ == "__main__":
    main()
