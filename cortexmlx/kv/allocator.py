"""Which blocks of the KV arena are free: contiguous runs of blocks, handed out and taken back in constant time.

Two ideas make it fast. The free runs are sorted by length (`freeruns`), so that the shortest run that fits is found
without a scan. Neighbouring free runs are always merged. For that, each free run carries its length at both ends
(boundary tags, Knuth, TAOCP vol. 1, 2.5), so a run that is given back finds its neighbours without a search.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from operator import index

from cortexmlx.errors import KVBlockError, KVCacheFull
from cortexmlx.kv.freeruns import NONE, FreeRuns, require

_FREE, _USED = 0, 1  # block flags
_USED_FLAG = bytes([_USED])


@dataclass(frozen=True, slots=True)
class KVHandle:
    """A run of consecutive blocks: `start`, `start + 1`, ... `stop - 1`. An empty handle (`count` 0) owns nothing."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        """The block after the last one."""
        return self.start + self.count


class KVBlockAllocator:
    """Hands out contiguous runs of KV blocks. It knows neither sequences nor tensors.

    The cost of `allocate`, `extend`, `trim` and `free` does not depend on the number of blocks or free runs, except
    that a byte per block of the run is set and checked at memory speed. The same calls in the same order always give
    the same blocks. A call either does all that it says, or raises and changes nothing.

    All methods may be called from any thread, but not from a finalizer or a signal handler that could interrupt one.
    """

    __slots__ = ("_flags", "_free_blocks", "_free_runs", "_lock", "_total_blocks")

    def __init__(self, total_blocks: int) -> None:
        """Start with `total_blocks` free blocks, numbered from 0. Raises KVBlockError for less than one."""
        self._lock = threading.Lock()
        self._free_runs = FreeRuns()
        # One more flag than blocks, always used: it ends the last run, and as flags[-1] it is also what block 0 finds
        # to its left.
        self._flags = bytearray(_USED_FLAG)
        self._total_blocks = 0
        self._free_blocks = 0
        self.grow(total_blocks)

    @property
    def total_blocks(self) -> int:
        """Blocks in the arena."""
        return self._total_blocks

    @property
    def free_blocks(self) -> int:
        """Free blocks in all runs together."""
        return self._free_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks that are allocated."""
        with self._lock:
            return self._total_blocks - self._free_blocks

    @property
    def largest_free_run(self) -> int:
        """The largest n for which `allocate(n)` succeeds; 0 when nothing is free."""
        with self._lock:
            return self._free_runs.longest()

    @property
    def free_blocks_at_end(self) -> int:
        """The largest n for which the arena's last n blocks are free. `shrink` can drop that many."""
        with self._lock:
            return self._free_at_end()

    def allocate(self, n: int) -> KVHandle:
        """Take a run of n blocks, out of the shortest free run that is long enough.

        Raises KVCacheFull if no free run has n blocks (then nothing is taken), KVBlockError if n is less than one.
        """
        n = _at_least_one(n, "allocate")
        with self._lock:
            start = self._free_runs.shortest_of(n) if n <= self._free_blocks else NONE
            if start == NONE:
                raise self._full(n)
            self._take(start, n)
            return KVHandle(start, n)

    def extend(self, handle: KVHandle, n: int) -> KVHandle | None:
        """Grow a run in place by the n blocks after it. Return the longer run, or None if these blocks are not all
        free.

        Raises KVBlockError if n is less than one, or if the handle is empty or names blocks that are not allocated.
        """
        n = _at_least_one(n, "extend")
        with self._lock:
            start, stop = self._allocated(handle)
            if start == stop:
                raise KVBlockError(f"cannot extend the empty run at block {start}: allocate a new run instead")
            if self._flags[stop] == _USED or self._free_runs.length_at(stop) < n:
                return None
            self._take(stop, n)
            return KVHandle(start, stop - start + n)

    def trim(self, handle: KVHandle, keep: int) -> KVHandle:
        """Give back all but the first `keep` blocks of a run, and return the shorter run (empty for `keep` 0).

        Raises KVBlockError when the handle names blocks that are not allocated, or has less than `keep` of them.
        """
        keep = index(keep)
        with self._lock:
            start, stop = self._allocated(handle)
            if not 0 <= keep <= stop - start:
                raise KVBlockError(
                    f"cannot keep {keep} of {stop - start} blocks: keep 0 to {stop - start}, or extend the run"
                )
            self._give_back(start + keep, stop)
            return KVHandle(start, keep)

    def free(self, handle: KVHandle) -> None:
        """Give back a run of allocated blocks: a whole run, a part of one, or several neighbouring runs together.

        Raises KVBlockError, and frees nothing, if one of the blocks is not allocated (freed before, or never taken).
        """
        with self._lock:
            start, stop = self._allocated(handle)
            self._give_back(start, stop)

    def grow(self, n: int) -> None:
        """Add n free blocks at the end. Raises KVBlockError when n is less than one."""
        n = _at_least_one(n, "add")
        with self._lock:
            old = self._total_blocks
            self._free_runs.resize(old + n)
            self._flags[old:old] = _USED_FLAG * n
            self._total_blocks = old + n
            self._give_back(old, old + n)

    def shrink(self, n: int) -> None:
        """Drop the last n blocks; at least one block stays.

        Raises KVBlockError, and drops nothing, when one of them is allocated or n is not in 1 .. total_blocks - 1.
        """
        n = _at_least_one(n, "drop")
        with self._lock:
            if n >= self._total_blocks:
                raise KVBlockError(f"cannot drop {n} of {self._total_blocks} blocks: at least one has to stay")
            tail = self._free_at_end()
            if n > tail:
                raise KVBlockError(
                    f"cannot drop the last {n} of {self._total_blocks} blocks: only the last {tail} are free, "
                    f"drop at most those or free the others first"
                )
            total = self._total_blocks - n
            self._take(self._total_blocks - tail, tail)
            del self._flags[total : self._total_blocks]
            self._free_runs.resize(total)
            self._total_blocks = total
            self._give_back(total - (tail - n), total)

    def fragmentation(self) -> float:
        """Return `1 - largest_free_run / free_blocks`: 0.0 if the free blocks are one run or none is free, near 1.0 if
        they are scattered.
        """
        with self._lock:
            return 1.0 - self._free_runs.longest() / self._free_blocks if self._free_blocks else 0.0

    def block_map(self, width: int | None = None) -> str:
        """One character per block, '.' free and 'X' used; with `width`, in lines of that many blocks.

        Raises KVBlockError when `width` is less than one.
        """
        with self._lock:
            blocks = bytes(self._flags[: self._total_blocks])
        text = blocks.translate(bytes.maketrans(bytes([_FREE, _USED]), b".X")).decode("ascii")
        if width is None:
            return text
        width = _at_least_one(width, "draw")
        return "\n".join(text[at : at + width] for at in range(0, len(text), width))

    def free_runs(self) -> list[KVHandle]:
        """All free runs in the order of their blocks, for statistics and debugging (costs a pass over the arena)."""
        with self._lock:
            return self._runs_in_flags()

    def check_invariants(self) -> None:
        """Recompute everything from the block flags alone. Raises AssertionError that says what disagrees."""
        with self._lock:
            total, runs = self._total_blocks, self._runs_in_flags()
            require(len(self._flags) == total + 1, f"{len(self._flags)} flags for {total} blocks and an end mark")
            require(self._flags[total] == _USED, "the end mark is gone")
            free = self._flags.count(_FREE)
            require(self._free_blocks == free, f"counted {self._free_blocks} free blocks, the flags say {free}")
            self._free_runs.check({run.start: run.count for run in runs}, total)

    def _allocated(self, handle: KVHandle) -> tuple[int, int]:
        """Return (start, stop) of a run. Raises KVBlockError unless all its blocks are allocated."""
        start, count = index(handle.start), index(handle.count)
        stop, total = start + count, self._total_blocks
        if start < 0 or count < 0 or stop > total:
            raise KVBlockError(
                f"blocks {start} to {stop - 1} are not in the arena of {total} blocks: "
                f"use the handle that this allocator gave"
            )
        hole = self._flags.find(_FREE, start, stop)
        if hole != -1:
            raise KVBlockError(
                f"block {hole} of the run {start} to {stop - 1} is not allocated: "
                f"it was freed before, or this handle is stale; use the last handle that this allocator gave"
            )
        return start, stop

    def _take(self, start: int, n: int) -> None:
        """Mark the first n blocks of the free run at `start` as used. The others stay free."""
        length = self._free_runs.remove(start)
        if length > n:
            self._free_runs.insert(start + n, length - n)
        self._flags[start : start + n] = _USED_FLAG * n
        self._free_blocks -= n

    def _give_back(self, start: int, stop: int) -> None:
        """Mark used blocks as free, merged with the free runs on both sides."""
        if start == stop:
            return
        self._flags[start:stop] = bytes(stop - start)
        self._free_blocks += stop - start
        if self._flags[start - 1] == _FREE:
            start -= self._free_runs.length_at(start - 1)
            self._free_runs.remove(start)
        if self._flags[stop] == _FREE:
            stop += self._free_runs.remove(stop)
        self._free_runs.insert(start, stop - start)

    def _free_at_end(self) -> int:
        last = self._total_blocks - 1
        return self._free_runs.length_at(last) if self._flags[last] == _FREE else 0

    def _runs_in_flags(self) -> list[KVHandle]:
        runs = []
        start = self._flags.find(_FREE)
        while start != -1:
            stop = self._flags.find(_USED, start)
            runs.append(KVHandle(start, stop - start))
            start = self._flags.find(_FREE, stop)
        return runs

    def _full(self, n: int) -> KVCacheFull:
        total, free = self._total_blocks, self._free_blocks
        if n > total:
            advice = "the arena can never hold it, so raise the KV memory (--kv-memory) or shorten the prompt"
        elif n > free:
            advice = "wait for running requests to end, or raise the KV memory (--kv-memory)"
        else:
            advice = "take several shorter runs, free blocks in between, or raise the KV memory (--kv-memory)"
        return KVCacheFull(
            f"asked for a run of {n} KV blocks, {free} of {total} are free and the longest free run has "
            f"{self._free_runs.longest()}: {advice}"
        )


def _at_least_one(n: int, verb: str) -> int:
    n = index(n)
    if n < 1:
        raise KVBlockError(f"cannot {verb} {n} blocks: ask for at least 1")
    return n
