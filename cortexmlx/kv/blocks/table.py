"""A sequence's block tables: its blocks in token order, one table per layer group. Knows nothing of other sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cortexmlx.arrays import IntArray
from cortexmlx.kv.blocks.allocator import KVHandle
from cortexmlx.kv.prefix import GONE, Blocks, Node


class BlockTable:
    """One sequence's blocks in one group, in token order: those of its places from `first` on. The places before that
    lie behind the group's window, and their blocks are given up.
    """

    __slots__ = ("blocks", "first")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.first = 0

    @property
    def end(self) -> int:
        """The place behind the last block."""
        return self.first + len(self.blocks)

    def at(self, place: int) -> int:
        """The block at a place, `GONE` if it is given up."""
        return self.blocks[place - self.first] if place >= self.first else GONE

    def array(self) -> IntArray:
        """The blocks, `[blocks]` int32."""
        return np.array(self.blocks, np.int32)

    def single_run(self) -> bool:
        """Whether the blocks are consecutive; none are."""
        return not self.blocks or _ascending(self.blocks)

    def row(self, begin: int, end: int, null: int) -> IntArray:
        """The blocks of the places `begin .. end`, `[end - begin]` int32; `null` stands for those that are given up."""
        if begin >= self.first:
            return np.array(self.blocks[begin - self.first : end - self.first], np.int32)
        gone = min(self.first - begin, end - begin)
        return np.array([null] * gone + self.blocks[begin + gone - self.first : end - self.first], np.int32)

    def run(self, begin: int, end: int) -> KVHandle | None:
        """The run that the places `begin .. end` are, or None if they are more than one, or none. Whatever block lies
        where one of them is given up belongs to somebody else, or to nobody: nobody may look there.
        """
        gone = max(self.first - begin, 0)
        blocks = self.blocks[begin + gone - self.first : end - self.first]
        if not blocks or blocks[0] < gone or not _ascending(blocks):
            return None
        return KVHandle(blocks[0] - gone, gone + len(blocks))

    def slots(self, start: int, count: int, block_size: int, null: int = GONE) -> IntArray:
        """The flat slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32; those of
        block `null` where the token's is given up.
        """
        positions = np.arange(start, start + count)
        first, last = start // block_size, -(-(start + count) // block_size)
        table = self.row(first, last, null)
        block = table[positions // block_size - first] if count else positions
        return (block * np.int64(block_size) + positions % block_size).astype(np.int32)

    def cut(self, keep: int) -> list[int]:
        """Take the blocks behind the first `keep` places out of the table, and return them."""
        keep = max(keep - self.first, 0)
        rest = self.blocks[keep:]
        del self.blocks[keep:]
        return rest

    def pass_by(self, place: int) -> list[int]:
        """Take the blocks of the places before `place` out of the table, and return them."""
        count = max(place - self.first, 0)
        passed = self.blocks[:count]
        del self.blocks[:count]
        self.first += len(passed)
        return passed


class SequenceBlocks:
    """A sequence's tables (one per group), its length in tokens, and how many of its blocks are in the prefix cache,
    up to `parent`: a root if there are none. `states` are its snapshots, by place, whose blocks are not in the prefix
    cache, and `snapshot` is the one that it began with.
    """

    __slots__ = ("length", "parent", "registered", "snapshot", "states", "tables")

    def __init__(self, groups: int, parent: Node) -> None:
        self.tables = [BlockTable() for _ in range(groups)]
        self.length = 0
        self.registered = 0
        self.parent = parent
        self.states: dict[int, int] = {}
        self.snapshot: int | None = None

    def blocks_at(self, index: int) -> Blocks:
        """The block of each group at `index`: they hold the same tokens. `GONE` where it is given up."""
        return tuple(table.at(index) for table in self.tables)

    def single_run(self) -> bool:
        """Whether the blocks are consecutive in every group."""
        return all(table.single_run() for table in self.tables)

    def describe(self) -> str:
        """The runs as `start+count`, groups separated by bars."""
        return " | ".join(" ".join(f"{h.start}+{h.count}" for h in runs_of(t.blocks)) for t in self.tables)


def runs_of(blocks: Sequence[int]) -> list[KVHandle]:
    """Split block numbers into runs of consecutive ones, in the order given."""
    runs: list[KVHandle] = []
    for block in blocks:
        if runs and block == runs[-1].start + runs[-1].count:
            runs[-1] = KVHandle(runs[-1].start, runs[-1].count + 1)
        else:
            runs.append(KVHandle(block, 1))
    return runs


def _ascending(blocks: list[int]) -> bool:
    return all(b == blocks[0] + i for i, b in enumerate(blocks))
