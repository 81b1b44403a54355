"""The free-block index of the KV arena: contiguous runs of blocks, allocated and freed in constant time.

Two ideas make it fast. The free runs are sorted by length (`FreeRunIndex`), so that the shortest run that fits is found
without a scan. Neighbouring free runs are always merged. For that, each free run carries its length at both ends
(boundary tags, Knuth, TAOCP vol. 1, 2.5), so a run that is given back finds its neighbours without a search.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from operator import index

from cortexmlx.errors import KVBlockError, KVCacheFull

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
    """Allocates contiguous runs of KV blocks. It knows neither sequences nor tensors.

    The cost of `allocate`, `extend`, `trim` and `free` does not depend on the number of blocks or free runs, except
    that a byte per block of the run is set and checked at memory speed. The same calls in the same order always give
    the same blocks. A call either does all that it says, or raises and changes nothing. It has no lock: an
    engine calls it on its own thread only.
    """

    __slots__ = ("_flags", "_free_blocks", "_free_runs", "_total_blocks")

    def __init__(self, total_blocks: int) -> None:
        """Start with `total_blocks` free blocks, numbered from 0. Raises KVBlockError for less than one."""
        self._free_runs = FreeRunIndex()
        # One more flag than blocks, always used: it ends the last run, and as flags[-1] it is also what block 0 finds
        # to its left.
        self._flags = bytearray(_USED_FLAG)
        self._total_blocks = 0
        self._free_blocks = 0
        self.grow(total_blocks)

    @property
    def total_blocks(self) -> int:
        """The number of blocks in the arena."""
        return self._total_blocks

    @property
    def free_blocks(self) -> int:
        """The number of free blocks, in all runs together."""
        return self._free_blocks

    @property
    def used_blocks(self) -> int:
        """The number of allocated blocks."""
        return self._total_blocks - self._free_blocks

    @property
    def largest_free_run(self) -> int:
        """The length of the longest free run, the largest n for which `allocate(n)` succeeds; 0 if nothing is free."""
        return self._free_runs.longest_length()

    @property
    def free_blocks_at_end(self) -> int:
        """The number of free blocks at the end of the arena, which `shrink` can drop."""
        last = self._total_blocks - 1
        return self._free_runs.length_at(last) if self._flags[last] == _FREE else 0

    def allocate(self, n: int) -> KVHandle:
        """Allocate a run of n blocks from the shortest free run that is long enough.

        Raises KVCacheFull if no free run has n blocks (then nothing is taken), KVBlockError if n is less than one.
        """
        n = _require_positive(n, "allocate")
        start = self._free_runs.find_best_fit(n) if n <= self._free_blocks else NO_RUN
        if start == NO_RUN:
            raise self._cache_full_error(n)
        self._mark_used(start, n)
        return KVHandle(start, n)

    def extend(self, handle: KVHandle, n: int) -> KVHandle | None:
        """Grow a run in place by the n blocks after it. Return the longer run, or None if these blocks are not all
        free.

        Raises KVBlockError if n is less than one, or if the handle is empty or names blocks that are not allocated.
        """
        n = _require_positive(n, "extend")
        start, stop = self._require_allocated(handle)
        if start == stop:
            raise KVBlockError(f"cannot extend the empty run at block {start}: allocate a new run instead")
        if self._flags[stop] == _USED or self._free_runs.length_at(stop) < n:
            return None
        self._mark_used(stop, n)
        return KVHandle(start, stop - start + n)

    def trim(self, handle: KVHandle, keep: int) -> KVHandle:
        """Free all but the first `keep` blocks of a run, and return the shorter run (empty for `keep` 0).

        Raises KVBlockError when the handle names blocks that are not allocated, or has less than `keep` of them.
        """
        keep = index(keep)
        start, stop = self._require_allocated(handle)
        if not 0 <= keep <= stop - start:
            raise KVBlockError(
                f"cannot keep {keep} of {stop - start} blocks: keep 0 to {stop - start}, or extend the run"
            )
        self._mark_free(start + keep, stop)
        return KVHandle(start, keep)

    def free(self, handle: KVHandle) -> None:
        """Free a run of allocated blocks: a whole run, a part of one, or several neighbouring runs together.

        Raises KVBlockError, and frees nothing, if one of the blocks is not allocated (freed before, or never taken).
        """
        start, stop = self._require_allocated(handle)
        self._mark_free(start, stop)

    def grow(self, n: int) -> None:
        """Add n free blocks at the end. Raises KVBlockError when n is less than one."""
        n = _require_positive(n, "add")
        old_total = self._total_blocks
        self._free_runs.resize(old_total + n)
        self._flags[old_total:old_total] = _USED_FLAG * n
        self._total_blocks = old_total + n
        self._mark_free(old_total, old_total + n)

    def shrink(self, n: int) -> None:
        """Drop the last n blocks; at least one block stays.

        Raises KVBlockError, and drops nothing, when one of them is allocated or n is not in 1 .. total_blocks - 1.
        """
        n = _require_positive(n, "drop")
        if n >= self._total_blocks:
            raise KVBlockError(f"cannot drop {n} of {self._total_blocks} blocks: at least one has to stay")
        free_tail = self.free_blocks_at_end
        if n > free_tail:
            raise KVBlockError(
                f"cannot drop the last {n} of {self._total_blocks} blocks: only the last {free_tail} are free, "
                f"drop at most those or free the others first"
            )
        total = self._total_blocks - n
        self._mark_used(self._total_blocks - free_tail, free_tail)
        del self._flags[total : self._total_blocks]
        self._free_runs.resize(total)
        self._total_blocks = total
        self._mark_free(total - (free_tail - n), total)

    def fragmentation(self) -> float:
        """Return `1 - largest_free_run / free_blocks`: 0.0 for one run or no free block, near 1.0 if scattered."""
        return 1.0 - self._free_runs.longest_length() / self._free_blocks if self._free_blocks else 0.0

    def block_map(self) -> str:
        """Return the arena as text with one character per block, '.' free and 'X' used."""
        blocks = bytes(self._flags[: self._total_blocks])
        return blocks.translate(bytes.maketrans(bytes([_FREE, _USED]), b".X")).decode("ascii")

    def free_runs(self) -> list[KVHandle]:
        """Return all free runs in block order, for statistics and debugging (costs a pass over the arena)."""
        runs = []
        start = self._flags.find(_FREE)
        while start != -1:
            stop = self._flags.find(_USED, start)
            runs.append(KVHandle(start, stop - start))
            start = self._flags.find(_FREE, stop)
        return runs

    def check_invariants(self) -> None:
        """Raise AssertionError if the free runs disagree with the block flags, from which everything is recomputed."""
        total, runs = self._total_blocks, self.free_runs()
        require(len(self._flags) == total + 1, f"{len(self._flags)} flags for {total} blocks and an end mark")
        require(self._flags[total] == _USED, "the end mark is gone")
        free = self._flags.count(_FREE)
        require(self._free_blocks == free, f"counted {self._free_blocks} free blocks, the flags say {free}")
        self._free_runs.check_invariants({run.start: run.count for run in runs}, total)

    def _require_allocated(self, handle: KVHandle) -> tuple[int, int]:
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

    def _mark_used(self, start: int, n: int) -> None:
        """Mark the first n blocks of the free run at `start` as used. The others stay free."""
        length = self._free_runs.remove(start)
        if length > n:
            self._free_runs.insert(start + n, length - n)
        self._flags[start : start + n] = _USED_FLAG * n
        self._free_blocks -= n

    def _mark_free(self, start: int, stop: int) -> None:
        """Mark used blocks as free, and merge them with the free runs on both sides."""
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

    def _cache_full_error(self, n: int) -> KVCacheFull:
        """Return the error for a request of n blocks that cannot be allocated."""
        total, free = self._total_blocks, self._free_blocks
        if n > total:
            advice = "the arena can never hold it, so raise the KV memory (--kv-memory) or shorten the prompt"
        elif n > free:
            advice = "wait for running requests to end, or raise the KV memory (--kv-memory)"
        else:
            advice = "take several shorter runs, free blocks in between, or raise the KV memory (--kv-memory)"
        return KVCacheFull(
            f"asked for a run of {n} KV blocks, {free} of {total} are free and the longest free run has "
            f"{self._free_runs.longest_length()}: {advice}"
        )


def _require_positive(n: int, verb: str) -> int:
    """Return n as an int. Raises KVBlockError if it is less than one."""
    n = index(n)
    if n < 1:
        raise KVBlockError(f"cannot {verb} {n} blocks: ask for at least 1")
    return n


# The free runs of an arena, sorted by length. Two bitmap look-ups find the shortest run that fits.
#
# This is the index of a two-level segregated fit (Masmano et al., "TLSF", 2004). TLSF keeps one list per *range* of
# lengths and rounds a request up to the next range. So it can miss a run that would fit unless it scans the range
# below. Here a length is a number of blocks, a few millions at most, so there is one list per *exact* length. Nothing
# is rounded or scanned, and a run of n blocks is found exactly when there is one.


NO_RUN = -1  # no run: the end of a list, or nothing long enough
_GROUP_BITS = 10  # the coarse bitmap has one bit per 1,024 neighbouring lengths, a fine bitmap one per length
_GROUP_MASK = (1 << _GROUP_BITS) - 1


class FreeRunIndex:
    """The free runs by length, one doubly linked list per length with the newest first. Not thread-safe.

    Two levels of bitmaps say which lists are not empty. Links and lengths are in flat arrays indexed by block, so a run
    needs no object of its own.
    """

    __slots__ = ("_coarse", "_fine", "_first", "_length", "_next", "_previous")

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # length -> the newest run of that length
        self._next = array("i")  # run -> the next older run of the same length
        self._previous = array("i")  # run -> the next newer run of the same length
        self._length = array("i")  # first and last block of a run -> its length; what lies between is stale
        self._fine: list[int] = []  # bit b of entry g: there are runs of length g * 1024 + b
        self._coarse = 0  # bit g: entry g of _fine is not 0

    def resize(self, total_blocks: int) -> None:
        """Make room in the index for `total_blocks` blocks. Blocks that are cut off must not be in a free run."""
        for per_block in (self._next, self._previous, self._length):
            del per_block[total_blocks:]
            per_block.extend(array("i", [NO_RUN]) * (total_blocks - len(per_block)))
        groups = (total_blocks >> _GROUP_BITS) + 1
        del self._fine[groups:]
        self._fine.extend([0] * (groups - len(self._fine)))

    def length_at(self, block: int) -> int:
        """Return the length of the free run that begins or ends with this block."""
        return self._length[block]

    def longest_length(self) -> int:
        """Return the length of the longest free run; 0 if there is none."""
        if not self._coarse:
            return 0
        group = self._coarse.bit_length() - 1
        return (group << _GROUP_BITS) + self._fine[group].bit_length() - 1

    def find_best_fit(self, n: int) -> int:
        """Return the first block of the shortest free run of at least n blocks, the newest of equals; NO_RUN if none
        is that long. n is at most the arena's number of blocks.
        """
        group = n >> _GROUP_BITS
        fine = self._fine[group] >> (n & _GROUP_MASK)
        if fine:
            return self._first[n + _lowest_bit(fine)]
        coarse = self._coarse >> (group + 1)
        if not coarse:
            return NO_RUN
        group += 1 + _lowest_bit(coarse)
        return self._first[(group << _GROUP_BITS) + _lowest_bit(self._fine[group])]

    def insert(self, start: int, length: int) -> None:
        self._length[start] = self._length[start + length - 1] = length
        older = self._first.get(length, NO_RUN)
        self._next[start] = older
        self._previous[start] = NO_RUN
        self._first[length] = start
        if older != NO_RUN:
            self._previous[older] = start
            return
        group = length >> _GROUP_BITS
        self._fine[group] |= 1 << (length & _GROUP_MASK)
        self._coarse |= 1 << group

    def remove(self, start: int) -> int:
        """Remove the free run that begins at `start`, and return its length."""
        length, older, newer = self._length[start], self._next[start], self._previous[start]
        if older != NO_RUN:
            self._previous[older] = newer
        if newer != NO_RUN:
            self._next[newer] = older
        elif older != NO_RUN:
            self._first[length] = older
        else:
            del self._first[length]
            group = length >> _GROUP_BITS
            self._fine[group] ^= 1 << (length & _GROUP_MASK)
            if not self._fine[group]:
                self._coarse ^= 1 << group
        return length

    def check_invariants(self, expected: dict[int, int], total_blocks: int) -> None:
        """Raise AssertionError unless lists, lengths and bitmaps agree with the expected runs (start -> length)."""
        sizes = {len(per_block) for per_block in (self._next, self._previous, self._length)}
        require(sizes == {total_blocks}, f"links and tags for {sizes} blocks, the arena has {total_blocks}")
        listed_runs: dict[int, int] = {}
        for length, first in self._first.items():
            newer, run = NO_RUN, first
            while run != NO_RUN:
                require(run not in listed_runs, f"the free run at {run} is listed twice")
                require(self._previous[run] == newer, f"the free run at {run} does not link back to {newer}")
                listed_runs[run] = length
                newer, run = run, self._next[run]
        mismatches = sorted(listed_runs.items() ^ expected.items())
        require(
            not mismatches,
            f"{len(mismatches)} free runs are only listed or only in the flags, (start, blocks) {mismatches[:8]}",
        )
        for start, length in expected.items():
            tags = (self._length[start], self._length[start + length - 1])
            require(tags == (length, length), f"the free run at {start} of {length} blocks is tagged {tags}")
        fine = [0] * ((total_blocks >> _GROUP_BITS) + 1)
        for length in set(expected.values()):
            fine[length >> _GROUP_BITS] |= 1 << (length & _GROUP_MASK)
        require(self._fine == fine, "the fine bitmaps do not say which lengths there are")
        coarse = sum(1 << group for group, bits in enumerate(fine) if bits)
        require(self._coarse == coarse, "the coarse bitmap does not say which groups of lengths there are")


def _lowest_bit(bits: int) -> int:
    """Return the position of the lowest set bit."""
    return (bits & -bits).bit_length() - 1


def require(condition: bool, problem: str) -> None:
    """Raise AssertionError with `problem` unless `condition`, also when Python runs with -O."""
    if not condition:
        raise AssertionError(problem)
