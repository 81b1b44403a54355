"""Every allocator hands out what is free, once, and takes back any part of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cortexmlx.bench.suites.allocators import Allocator, BuddyAllocator, LoopScan, SubstringScan
from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVHandle


@pytest.mark.parametrize("make", [BuddyAllocator, LoopScan, SubstringScan])
@pytest.mark.parametrize("blocks", [1, 37, 64])
def test_no_block_is_handed_out_twice_and_none_is_lost(make: Callable[[int], Allocator], blocks: int) -> None:
    chosen, allocator, used = random.Random(blocks), make(blocks), set[int]()
    for _ in range(600):
        if used and chosen.random() < 0.45:
            block = chosen.choice(sorted(used))
            stop = block + 1
            while stop in used and chosen.random() < 0.7:
                stop += 1
            allocator.free(KVHandle(block, stop - block))
            used -= set(range(block, stop))
            continue
        try:
            run = allocator.allocate(chosen.randint(1, 9))
        except KVCacheFull:
            continue
        taken = set(range(run.start, run.stop))
        assert not taken & used and max(taken) < blocks
        used |= taken
    for block in sorted(used):
        allocator.free(KVHandle(block, 1))
    assert allocator.allocate(1 << (blocks.bit_length() - 1)).start == 0  # all merged again
