"""Contiguous block allocators for comparison: first-fit scans over all blocks, and a buddy allocator."""

from __future__ import annotations

from typing import Protocol

from cortexmlx.errors import KVCacheFull
from cortexmlx.kv.allocator import KVHandle


class Allocator(Protocol):
    """The interface of all allocators that are compared."""

    def allocate(self, n: int) -> KVHandle: ...

    def free(self, handle: KVHandle) -> None: ...


class LoopScan:
    """First-fit allocator by a loop over all blocks: the simplest that works."""

    def __init__(self, total_blocks: int) -> None:
        self._is_free = [True] * total_blocks

    def allocate(self, n: int) -> KVHandle:
        length = 0
        for block, free in enumerate(self._is_free):
            if not free:
                length = 0
                continue
            length += 1
            if length == n:
                start = block - n + 1
                self._is_free[start : block + 1] = [False] * n
                return KVHandle(start, n)
        raise KVCacheFull(f"no run of {n} blocks: free some first")

    def free(self, handle: KVHandle) -> None:
        self._is_free[handle.start : handle.stop] = [True] * handle.count


class SubstringScan:
    """First-fit allocator by the fastest scan that Python has: a search for n zero bytes, in C."""

    def __init__(self, total_blocks: int) -> None:
        self._used_flags = bytearray(total_blocks)

    def allocate(self, n: int) -> KVHandle:
        start = self._used_flags.find(bytes(n))
        if start == -1:
            raise KVCacheFull(f"no run of {n} blocks: free some first")
        self._used_flags[start : start + n] = b"\x01" * n
        return KVHandle(start, n)

    def free(self, handle: KVHandle) -> None:
        self._used_flags[handle.start : handle.stop] = bytes(handle.count)


class BuddyAllocator:
    """Allocator of binary buddies (Knuth, TAOCP vol. 1, 2.5). Free runs are powers of two at multiples of their
    length. Two halves of a run merge when both are free.

    A request is rounded up to a power of two, and the surplus is freed at once. Any part of a run may be freed. So
    nothing is wasted except by the limit on where a run may begin.
    """

    def __init__(self, total_blocks: int) -> None:
        self._levels = max(1, total_blocks.bit_length())
        self._free: list[dict[int, None]] = [{} for _ in range(self._levels)]  # for each level, where its runs begin
        self._free_range(0, total_blocks)

    def allocate(self, n: int) -> KVHandle:
        """Return a run of `n` blocks, from a free run of the next power of two."""
        min_level = (n - 1).bit_length()
        level = next((i for i in range(min_level, self._levels) if self._free[i]), None)
        if level is None:
            raise KVCacheFull(f"no run of {n} blocks: free some first")
        start, _ = self._free[level].popitem()
        self._free_range(start + n, start + (1 << level))
        return KVHandle(start, n)

    def free(self, handle: KVHandle) -> None:
        self._free_range(handle.start, handle.stop)

    def _free_range(self, start: int, stop: int) -> None:
        """Free `start .. stop - 1` in the largest runs that lie at multiples of their length."""
        while start < stop:
            level = (stop - start).bit_length() - 1
            if start:
                level = min(level, (start & -start).bit_length() - 1)
            self._merge(start, level)
            start += 1 << level

    def _merge(self, start: int, level: int) -> None:
        """Free a run of 2^level blocks, and merge it with its buddies while they are free."""
        while level + 1 < self._levels and start ^ (1 << level) in self._free[level]:
            del self._free[level][start ^ (1 << level)]
            start &= ~(1 << level)
            level += 1
        self._free[level][start] = None
