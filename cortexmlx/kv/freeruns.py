"""The free runs of an arena, sorted by length. Two bitmap look-ups find the shortest run that fits.

This is the index of a two-level segregated fit (Masmano et al., "TLSF", 2004). TLSF keeps one list per *range* of
lengths and rounds a request up to the next range. So it can miss a run that would fit unless it scans the range below.
Here a length is a number of blocks, a few millions at most, so there is one list per *exact* length. Nothing is rounded
or scanned, and a run of n blocks is found exactly when there is one.
"""

from __future__ import annotations

from array import array

NONE = -1  # no run: the end of a list, or nothing long enough
_GROUP_BITS = 10  # the coarse bitmap has one bit per 1,024 neighbouring lengths, a fine bitmap one per length
_GROUP_MASK = (1 << _GROUP_BITS) - 1


class FreeRuns:
    """Runs of free blocks in one doubly linked list per length, the newest first. Not thread-safe.

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
        """Make room for `total_blocks` blocks. Blocks that are cut off must not be in a free run."""
        for per_block in (self._next, self._previous, self._length):
            del per_block[total_blocks:]
            per_block.extend(array("i", [NONE]) * (total_blocks - len(per_block)))
        groups = (total_blocks >> _GROUP_BITS) + 1
        del self._fine[groups:]
        self._fine.extend([0] * (groups - len(self._fine)))

    def length_at(self, block: int) -> int:
        """Return the length of the run that begins or ends with this block."""
        return self._length[block]

    def longest(self) -> int:
        """Return the length of the longest run, 0 without runs."""
        if not self._coarse:
            return 0
        group = self._coarse.bit_length() - 1
        return (group << _GROUP_BITS) + self._fine[group].bit_length() - 1

    def shortest_of(self, n: int) -> int:
        """Return the first block of the shortest run of at least n blocks, the newest such run; NONE if no run is that
        long. n is at most the arena's number of blocks.
        """
        group = n >> _GROUP_BITS
        fine = self._fine[group] >> (n & _GROUP_MASK)
        if fine:
            return self._first[n + _lowest_bit(fine)]
        coarse = self._coarse >> (group + 1)
        if not coarse:
            return NONE
        group += 1 + _lowest_bit(coarse)
        return self._first[(group << _GROUP_BITS) + _lowest_bit(self._fine[group])]

    def insert(self, start: int, length: int) -> None:
        self._length[start] = self._length[start + length - 1] = length
        older = self._first.get(length, NONE)
        self._next[start] = older
        self._previous[start] = NONE
        self._first[length] = start
        if older != NONE:
            self._previous[older] = start
            return
        group = length >> _GROUP_BITS
        self._fine[group] |= 1 << (length & _GROUP_MASK)
        self._coarse |= 1 << group

    def remove(self, start: int) -> int:
        """Take the run that begins at `start` out of its list, and return its length."""
        length, older, newer = self._length[start], self._next[start], self._previous[start]
        if older != NONE:
            self._previous[older] = newer
        if newer != NONE:
            self._next[newer] = older
        elif older != NONE:
            self._first[length] = older
        else:
            del self._first[length]
            group = length >> _GROUP_BITS
            self._fine[group] ^= 1 << (length & _GROUP_MASK)
            if not self._fine[group]:
                self._coarse ^= 1 << group
        return length

    def check(self, expected: dict[int, int], total_blocks: int) -> None:
        """Raise AssertionError unless lists, lengths and bitmaps agree with the expected runs (start -> length)."""
        sizes = {len(per_block) for per_block in (self._next, self._previous, self._length)}
        require(sizes == {total_blocks}, f"links and tags for {sizes} blocks, the arena has {total_blocks}")
        found: dict[int, int] = {}
        for length, first in self._first.items():
            newer, run = NONE, first
            while run != NONE:
                require(run not in found, f"the free run at {run} is listed twice")
                require(self._previous[run] == newer, f"the free run at {run} does not link back to {newer}")
                found[run] = length
                newer, run = run, self._next[run]
        odd = sorted(found.items() ^ expected.items())
        require(not odd, f"{len(odd)} free runs are only listed or only in the flags, (start, blocks) {odd[:8]}")
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
    return (bits & -bits).bit_length() - 1


def require(holds: bool, problem: str) -> None:
    """Raise AssertionError with `problem` unless `holds`, also when Python runs with -O."""
    if not holds:
        raise AssertionError(problem)
