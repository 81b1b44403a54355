"""Measures the cost of a call to the KV block allocator: by the size of the arena, and compared with scans of it.

`python -m cortexmlx.bench.studies.allocator` prints both tables; `measure_costs()` returns them as data. Only calls to
the allocator, and the loop that makes them, are timed. Drawing random numbers and filling the arena are not.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cortexmlx.bench.suites.allocators import Allocator, LoopScan, NumpyScan, SubstringScan
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle

ARENA_SIZES = (1_000, 10_000, 100_000, 1_000_000)
SCAN_BLOCKS = 100_000
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
class ScanCost:
    """Microseconds of one `allocate` and the `free` that undoes it, when only the arena's last run is long enough."""

    name: str
    repeats_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median microseconds per pair of calls."""
        return statistics.median(self.repeats_us)


@dataclass(frozen=True)
class AllocatorBench:
    """All figures of the study; the first entry of `scans` is KVBlockAllocator itself."""

    churn: tuple[ChurnCost, ...]
    scans: tuple[ScanCost, ...]

    @property
    def cost_growth(self) -> float:
        """Cost of a call in the largest arena over the cost in the smallest."""
        return self.churn[-1].median_us / self.churn[0].median_us


SCANS: tuple[tuple[str, Callable[[int], Allocator]], ...] = (
    ("KVBlockAllocator", KVBlockAllocator),
    ("linear scan, Python loop", LoopScan),
    ("linear scan, NumPy", NumpyScan),
    ("linear scan, bytearray.find", SubstringScan),
)


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


def measure_scans(total_blocks: int = SCAN_BLOCKS, repeats: int = 5) -> tuple[ScanCost, ...]:
    """Measure each allocator: allocate and free the last 64 blocks, where every second one before them is free."""
    results = []
    for name, make in SCANS:
        allocator = make(total_blocks)
        allocator.allocate(total_blocks)
        for block in range(0, total_blocks - LONGEST - 1, 2):
            allocator.free(KVHandle(block, 1))
        last = KVHandle(total_blocks - LONGEST, LONGEST)
        allocator.free(last)
        results.append(ScanCost(name, tuple(_pair_cost(allocator, last) for _ in range(repeats))))
    return tuple(results)


def _pair_cost(allocator: Allocator, expected: KVHandle) -> float:
    """Return the microseconds to allocate and free the last run, the mean over at least 50 ms of such pairs."""
    pairs, spent_seconds = 0, 0.0
    started = time.perf_counter()
    while spent_seconds < 0.05:
        run = allocator.allocate(expected.count)
        allocator.free(run)
        if run != expected:
            raise AssertionError(f"allocated {run}, only {expected} is long enough")
        pairs += 1
        spent_seconds = time.perf_counter() - started
    return spent_seconds * 1e6 / pairs


def measure_costs(repeats: int = 5) -> AllocatorBench:
    """Measure the costs of churn and of scans, in about ten seconds."""
    return AllocatorBench(measure_churn(repeats=repeats), measure_scans(repeats=repeats))


def report(bench: AllocatorBench) -> str:
    """Return the figures as two Markdown tables."""
    lines = [
        f"allocate or free, runs of 1 to {LONGEST} blocks, half of the arena free, median of "
        f"{len(bench.churn[0].repeats_us)} (fastest to slowest):",
        "",
        "| blocks | fragmentation | us per call | of the smallest |",
        "|---:|---:|---:|---:|",
    ]
    for row in bench.churn:
        lines.append(
            f"| {row.total_blocks:,} | {row.fragmentation:.3f} | {row.median_us:.2f} "
            f"({min(row.repeats_us):.2f} to {max(row.repeats_us):.2f}) | "
            f"{row.median_us / bench.churn[0].median_us:.2f}x |"
        )
    our_median_us = bench.scans[0].median_us
    lines += [
        "",
        f"allocate {LONGEST} blocks and free them, {SCAN_BLOCKS:,} blocks, only the last run is long enough:",
        "",
        "| allocator | us per pair | of ours |",
        "|---|---:|---:|",
    ]
    lines += [f"| {row.name} | {row.median_us:,.2f} | {row.median_us / our_median_us:,.1f}x |" for row in bench.scans]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study, and print its tables."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.allocator", description=measure_costs.__doc__
    )
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which the median counts (default 5)")
    print(report(measure_costs(parser.parse_args(argv).repeats)))


if __name__ == "__main__":
    main()
