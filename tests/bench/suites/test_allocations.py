"""Recorded calls of the scheduler come back the same on every allocator."""

from __future__ import annotations

from cortexmlx.bench.suites import allocations
from cortexmlx.bench.suites.allocations import (
    ALLOCATORS,
    BLOCKS,
    OURS,
    AllocatorCall,
    measure_allocators,
    record_traces,
    replay_calls,
)
from cortexmlx.kv.allocator import KVHandle


class Counting:
    """Notes what is free, and refuses nothing."""

    def __init__(self, blocks: int, longest: int) -> None:
        self._ours, self._longest = ALLOCATORS[OURS](blocks), longest
        self.held = 0

    def allocate(self, n: int) -> KVHandle:
        if n > self._longest:
            raise allocations.KVCacheFull("too long")
        self.held += n
        return self._ours.allocate(n)

    def free(self, run: KVHandle) -> None:
        self.held -= run.count
        self._ours.free(run)


def test_recorded_traces_replay_on_all_allocators() -> None:
    found = record_traces(0, 32, 24)
    assert all(sum(call.kind == "allocate" for call in calls) >= 24 for calls in found.values())
    replays = measure_allocators(found, 2, lambda what: None)
    assert {(r.trace, r.allocator) for r in replays} == {(trace, name) for trace in found for name in ALLOCATORS}
    assert all(len(r.microseconds) == 2 and min(r.microseconds) > 0 and r.runs >= r.request_count for r in replays)
    ours = [r for r in replays if r.allocator == OURS]
    assert all(r.runs == r.request_count for r in ours)  # the same history gives the same runs


def test_a_run_that_is_not_there_is_cut_and_the_parts_are_freed() -> None:
    calls = [
        AllocatorCall("allocate", KVHandle(0, 5)),
        AllocatorCall("allocate", KVHandle(5, 3), is_extension=True),
        AllocatorCall("free", KVHandle(2, 6)),
        AllocatorCall("free", KVHandle(0, 2)),
    ]
    assert replay_calls(ALLOCATORS[OURS](BLOCKS), calls)[1] == 2  # the second is the first, made longer
    allocator = Counting(BLOCKS, 2)
    _, runs = replay_calls(allocator, calls)
    assert runs == 3 + 2 and allocator.held == 0  # 5 = 2 + (1 + 2), 3 = 1 + 2
