"""KVBlockAllocator call by call: what it gives, what it refuses, what it costs."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import CortexError, KVBlockError, KVCacheFull
from cortexmlx.kv import allocator as allocator_module
from cortexmlx.kv import allocator as freeruns_module
from cortexmlx.kv.allocator import KVBlockAllocator, KVHandle


def test_the_shortest_run_that_fits_is_taken_across_groups_of_lengths() -> None:
    # Lengths on both sides of 1,024 and 2,048, where the coarse bitmap takes over.
    lengths = [1, 2, 1022, 1023, 1024, 1025, 2047, 2048, 2049, 5000]
    order = random.Random(3).sample(lengths, len(lengths))
    allocator = KVBlockAllocator(sum(lengths) + len(lengths))
    start_of = {}
    for length in order:
        run = allocator.allocate(length + 1)
        start_of[length] = run.start
    assert allocator.free_blocks == 0
    for length in order:
        allocator.free(KVHandle(start_of[length], length))
    for n in (1, 2, 3, 1022, 1023, 1024, 1025, 1026, 2047, 2048, 2049, 2050, 5000):
        best = min(length for length in lengths if length >= n)
        run = allocator.allocate(n)
        assert run == KVHandle(start_of[best], n)
        allocator.free(run)
    with pytest.raises(KVCacheFull):
        allocator.allocate(5001)
    allocator.check_invariants()


def lines_run(call: Any, *arguments: Any) -> int:
    """Lines of the allocator that one call executes: its cost without a clock."""
    files = {allocator_module.__file__, freeruns_module.__file__}
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
    return lines


def test_a_call_runs_as_many_lines_at_a_hundred_thousand_blocks_as_at_a_thousand() -> None:
    def cost(total: int) -> list[int]:
        """Every second block is free, and the last 64: the worst case of a scan."""
        allocator = KVBlockAllocator(total)
        allocator.allocate(total)
        for block in range(0, total - 65, 2):
            allocator.free(KVHandle(block, 1))
        allocator.free(KVHandle(total - 64, 64))
        run = KVHandle(total - 64, 63)
        return [
            lines_run(allocator.allocate, 63),
            lines_run(allocator.extend, run, 1),
            lines_run(allocator.trim, KVHandle(run.start, 64), 10),
            lines_run(allocator.free, KVHandle(run.start, 10)),
            lines_run(lambda: allocator.largest_free_run),
        ]

    few, many = cost(1_000), cost(100_000)
    assert few == many
    assert max(many) < 60


def test_handles_are_immutable_and_empty_ones_own_nothing() -> None:
    allocator = KVBlockAllocator(8)
    run = allocator.allocate(4)
    with pytest.raises(AttributeError):
        run.count = 8  # type: ignore[misc]
    empty = allocator.trim(run, 0)
    assert empty == KVHandle(0, 0)
    assert allocator.used_blocks == 0
    allocator.free(empty)
    with pytest.raises(KVBlockError, match="allocate a new run"):
        allocator.extend(empty, 1)
    assert allocator.used_blocks == 0


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        (101, "can never hold it"),
        (1_000_000, "can never hold it"),
        (60, "wait for running requests"),
        (21, "several shorter runs"),
    ],
)
def test_a_full_arena_says_how_much_was_asked_free_and_in_one_run(asked: int, advice: str) -> None:
    allocator = KVBlockAllocator(100)
    allocator.allocate(100)
    for start in (0, 40):
        allocator.free(KVHandle(start, 20))
    with pytest.raises(KVCacheFull, match=f"run of {asked} .* 40 of 100 are free .* has 20: .*{advice}") as caught:
        allocator.allocate(asked)
    assert isinstance(caught.value, CortexError)
    assert allocator.block_map(20) == "\n".join(["." * 20, "X" * 20, "." * 20, "X" * 20, "X" * 20])


def test_a_double_free_is_refused_with_the_block_and_changes_nothing() -> None:
    allocator = KVBlockAllocator(10)
    run = allocator.allocate(6)
    allocator.free(KVHandle(2, 1))
    with pytest.raises(KVBlockError, match="block 2 of the run 0 to 5 is not allocated"):
        allocator.free(run)
    assert allocator.block_map() == "XX.XXX...."


@pytest.mark.parametrize("handle", [KVHandle(-1, 2), KVHandle(9, 2), KVHandle(10, 1), KVHandle(3, -1)])
def test_blocks_outside_the_arena_are_refused(handle: KVHandle) -> None:
    allocator = KVBlockAllocator(10)
    allocator.allocate(10)
    for call in (allocator.free, lambda run: allocator.trim(run, 0), lambda run: allocator.extend(run, 1)):
        with pytest.raises(KVBlockError, match="arena of 10 blocks"):
            call(handle)
    assert allocator.used_blocks == 10


@pytest.mark.parametrize("n", [0, -1])
def test_counts_below_one_are_refused(n: int) -> None:
    allocator = KVBlockAllocator(10)
    run = allocator.allocate(4)
    for call in (
        allocator.allocate,
        allocator.grow,
        allocator.shrink,
        allocator.block_map,
        KVBlockAllocator,
        lambda count: allocator.extend(run, count),
    ):
        with pytest.raises(KVBlockError):
            call(n)
    for keep in (-1, 5):
        with pytest.raises(KVBlockError, match="of 4 blocks"):
            allocator.trim(run, keep)
    assert (allocator.total_blocks, allocator.used_blocks) == (10, 4)


def test_numpy_integers_count_as_integers() -> None:
    allocator = KVBlockAllocator(np.int32(3000))
    run = allocator.allocate(np.int64(1500))
    assert type(run.start) is int and type(run.count) is int
    longer = allocator.extend(KVHandle(np.int32(0), np.int32(1500)), np.int32(2))
    assert longer == KVHandle(0, 1502)
    allocator.free(KVHandle(np.int32(0), np.int32(1502)))
    allocator.check_invariants()
    assert allocator.largest_free_run == 3000
