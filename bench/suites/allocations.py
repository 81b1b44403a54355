"""Records the block allocator's calls in real schedules, and replays them: on itself, on a buddy allocator and on
scans.

The scheduler and the cache run as in an engine, without a model, and every call to the allocator is recorded. Replays
make the same calls in the same order. An allocator may have enough free blocks, but no run of the length. Then the
request is cut in halves, as the cache would have to do. So the number of runs that a trace needed shows fragmentation.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.suites.allocators import Allocator, BuddyAllocator, LoopScan, SubstringScan
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle
from cortexmlx.kv.cache import KVCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.spec import KVSpec, group_layers
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams

ROWS = 16
BLOCKS = 8_192
ANSWER = 48

OURS = "cortexmlx"
ALLOCATORS: dict[str, Callable[[int], Allocator]] = {
    OURS: KVBlockAllocator,
    "buddy": BuddyAllocator,
    "linear scan, C search": SubstringScan,
    "linear scan, loop": LoopScan,
}


class AllocatorCall(NamedTuple):
    """A recorded call: `allocate` or `extend` returned `run`, or `free` took it. Block numbers are as recorded."""

    kind: str
    run: KVHandle
    is_extension: bool = False
    """Whether the call was `extend`. `run` is then the added part."""


class RecordingAllocator:
    """An allocator that records the calls that change it, and forwards all calls."""

    def __init__(self, allocator: KVBlockAllocator) -> None:
        self.calls: list[AllocatorCall] = []
        self._allocator = allocator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._allocator, name)

    def allocate(self, n: int) -> KVHandle:
        run = self._allocator.allocate(n)
        self.calls.append(AllocatorCall("allocate", run))
        return run

    def extend(self, handle: KVHandle, n: int) -> KVHandle | None:
        """Extend a run by `n` blocks if it can grow, and record the call."""
        extended_run = self._allocator.extend(handle, n)
        if extended_run is not None:
            self.calls.append(AllocatorCall("allocate", KVHandle(handle.stop, n), is_extension=True))
        return extended_run

    def free(self, handle: KVHandle) -> None:
        self._allocator.free(handle)
        self.calls.append(AllocatorCall("free", handle))


def record_calls(requests: Sequence[tuple[Sequence[int], int]], block_size: int) -> list[AllocatorCall]:
    """Schedule `requests` (prompt, tokens to generate), and return the allocator's calls."""
    groups = group_layers([KVSpec(1, 8, 8, "float16")])
    cache = KVCache(BlockPools(groups, BLOCKS, block_size))
    recorder = RecordingAllocator(cache.pools[0].allocator)
    cache.pools[0].allocator = recorder  # type: ignore[assignment]
    scheduler = Scheduler(cache, SchedulerConfig(max_rows=ROWS, prefill_budget=512, context_length=1 << 20))
    pending_requests = list(reversed(requests))
    while pending_requests or not scheduler.is_idle:
        while pending_requests and scheduler.rows_waiting < ROWS:
            prompt, tokens = pending_requests.pop()
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            scheduler.add(JobId(len(pending_requests)), QueuedRequest(tuple(prompt), params), frozenset())
        plan = scheduler.plan(0)
        if plan is not None:
            for row in scheduler.commit(plan, [7] * len(plan.logit_segments)):
                if row.finish_reason is not None:
                    scheduler.finish(row.job.id, row.finish_reason)
    return recorder.calls


def record_traces(seed: int, block_size: int, requests: int) -> dict[str, list[AllocatorCall]]:
    """Record traces of unrelated requests and of chat turns. Beginnings of chats stay cached until others need room."""
    prompts, rng = PromptStream(50_000, seed), random.Random(seed)
    ragged_requests = [(prompts.next_prompt(n), ANSWER) for n in prompts.draw_lengths(requests, 32, 2_048)]
    chats: list[tuple[int, ...]] = [() for _ in range(max(1, requests // 8))]
    turns = []
    for length in prompts.draw_lengths(requests, 32, 512):
        chat = rng.randrange(len(chats))
        chats[chat] += prompts.next_prompt(length)
        turns.append((chats[chat], ANSWER))
        chats[chat] += (7,) * (ANSWER - 1)
    return {"ragged requests": record_calls(ragged_requests, block_size), "chat turns": record_calls(turns, block_size)}


@dataclass(frozen=True)
class ReplayResult:
    """The result of an allocator on a trace: microseconds per call, and runs needed."""

    trace: str
    allocator: str
    microseconds: tuple[float, ...]
    """Microseconds per call, for each repetition."""
    calls: int
    """Calls of the trace."""
    request_count: int
    """Requests for a run."""
    runs: int
    """Runs that the allocator needed for them."""


def measure_allocators(
    traces: dict[str, list[AllocatorCall]], repetitions: int, on_run: Callable[[str], None], names: Sequence[str] = ()
) -> list[ReplayResult]:
    """Replay every trace on every allocator, in turns."""
    allocator_names = names or tuple(ALLOCATORS)
    times: dict[tuple[str, str], list[float]] = {(trace, name): [] for trace in traces for name in allocator_names}
    runs: dict[tuple[str, str], int] = {}
    for repetition in range(repetitions):
        for trace, name in times if repetition % 2 == 0 else reversed(times):
            on_run(f"allocator, run {repetition + 1} of {repetitions}: {name} on {trace}")
            gc.collect()
            seconds, runs[trace, name] = replay_calls(ALLOCATORS[name](BLOCKS), traces[trace])
            times[trace, name].append(seconds * 1e6 / len(traces[trace]))
    request_counts = {trace: sum(call.kind == "allocate" for call in calls) for trace, calls in traces.items()}
    return [
        ReplayResult(trace, name, tuple(values), len(traces[trace]), request_counts[trace], runs[trace, name])
        for (trace, name), values in times.items()
    ]


def replay_calls(allocator: Allocator, calls: Sequence[AllocatorCall]) -> tuple[float, int]:
    """Replay calls on an allocator. Return the seconds spent in it, and how many runs it returned."""
    block_map = [0] * BLOCKS  # for each recorded block, the block that stands for it here
    seconds, run_count, clock = 0.0, 0, time.perf_counter
    extend = getattr(allocator, "extend_table", None)
    for call in calls:
        start, stop = call.run.start, call.run.stop
        if call.kind == "allocate":
            started = clock()
            extended_run = (
                extend(KVHandle(block_map[start - 1], 1), stop - start)
                if call.is_extension and extend is not None
                else None
            )
            runs = (
                [KVHandle(extended_run.start + 1, stop - start)]
                if extended_run is not None
                else _allocate_in_pieces(allocator, stop - start)
            )
            seconds += clock() - started
            run_count += len(runs)
            block_map[start:stop] = [block for run in runs for block in range(run.start, run.stop)]
        else:
            freed_runs = _group_into_runs(block_map[start:stop])
            started = clock()
            for freed_run in freed_runs:
                allocator.free(freed_run)
            seconds += clock() - started
    return seconds, run_count


def _allocate_in_pieces(allocator: Allocator, n: int) -> list[KVHandle]:
    """Allocate one run. If there is no run of the length, allocate two of half the length, and so on."""
    try:
        return [allocator.allocate(n)]
    except KVCacheFull:
        if n == 1:
            raise
    return _allocate_in_pieces(allocator, n // 2) + _allocate_in_pieces(allocator, n - n // 2)


def _group_into_runs(blocks: Sequence[int]) -> list[KVHandle]:
    """Return blocks as runs of consecutive blocks."""
    runs = [KVHandle(blocks[0], 1)]
    for block in blocks[1:]:
        if block == runs[-1].stop:
            runs[-1] = KVHandle(runs[-1].start, runs[-1].count + 1)
        else:
            runs.append(KVHandle(block, 1))
    return runs
