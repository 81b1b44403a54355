"""The block tables of one sequence: its blocks in token order, one table per layer group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.prefix import GONE, Blocks, PrefixNode
from cortexmlx.types.arrays import IntArray


class BlockTable:
    """One sequence's blocks in one group, in token order. `blocks[0]` is the block at index `first` of the sequence.
    The blocks before it have been passed by the group's window, and were given up.
    """

    __slots__ = ("blocks", "first")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.first = 0

    @property
    def end(self) -> int:
        """The index in the sequence after the last block."""
        return self.first + len(self.blocks)

    def block_at(self, index: int) -> int:
        """Return the block at an index of the sequence, `GONE` if it was given up."""
        return self.blocks[index - self.first] if index >= self.first else GONE

    def to_array(self) -> IntArray:
        """Return the blocks, `[blocks]` int32."""
        return np.array(self.blocks, np.int32)

    def is_single_run(self) -> bool:
        """Return whether the blocks are consecutive; True for an empty table."""
        return not self.blocks or _is_consecutive(self.blocks)

    def table_row(self, begin: int, end: int, null: int) -> IntArray:
        """Return the blocks at indices `begin .. end`, `[end - begin]` int32, with `null` for blocks given up."""
        if begin >= self.first:
            return np.array(self.blocks[begin - self.first : end - self.first], np.int32)
        removed_count = min(self.first - begin, end - begin)
        return np.array(
            [null] * removed_count + self.blocks[begin + removed_count - self.first : end - self.first], np.int32
        )

    def find_run(self, begin: int, end: int) -> KVHandle | None:
        """Return the run that has the blocks at the indices `begin .. end`, or None if there are several runs or no
        blocks.

        The run also covers the indices of blocks that were given up. The blocks there belong to others, and must not be
        read.
        """
        removed_count = max(self.first - begin, 0)
        blocks = self.blocks[begin + removed_count - self.first : end - self.first]
        if not blocks or blocks[0] < removed_count or not _is_consecutive(blocks):
            return None
        return KVHandle(blocks[0] - removed_count, removed_count + len(blocks))

    def slots(self, start: int, count: int, block_size: int, null: int = GONE) -> IntArray:
        """Return the arena slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32.
        Tokens whose block was given up have slots of block `null`.
        """
        positions = np.arange(start, start + count)
        first, last = start // block_size, -(-(start + count) // block_size)
        table = self.table_row(first, last, null)
        block = table[positions // block_size - first] if count else positions
        return (block * np.int64(block_size) + positions % block_size).astype(np.int32)

    def remove_from(self, keep: int) -> list[int]:
        """Remove the table's blocks from index `keep` onward, and return them."""
        keep = max(keep - self.first, 0)
        rest = self.blocks[keep:]
        del self.blocks[keep:]
        return rest

    def remove_before(self, index: int) -> list[int]:
        """Remove the blocks before index `index` from the table, and return them."""
        count = max(index - self.first, 0)
        removed_blocks = self.blocks[:count]
        del self.blocks[:count]
        self.first += len(removed_blocks)
        return removed_blocks


class SequenceBlocks:
    """A sequence's block tables, one per group, and its place in the prefix cache."""

    __slots__ = ("length", "parent", "registered", "snapshot", "states", "tables", "transient")

    def __init__(self, groups: int, parent: PrefixNode) -> None:
        self.tables = [BlockTable() for _ in range(groups)]
        self.length = 0
        self.registered = 0
        self.parent = parent
        self.states: dict[int, int] = {}
        self.snapshot: int | None = None
        self.transient = False
        """See `KVCache.allocate_for`."""

    def blocks_at(self, index: int) -> Blocks:
        """Return each group's block at an index; all hold the same tokens. `GONE` stands for a block given up."""
        return tuple(table.block_at(index) for table in self.tables)

    def is_single_run(self) -> bool:
        """Return whether the blocks are consecutive in every group."""
        return all(table.is_single_run() for table in self.tables)

    def describe(self) -> str:
        """Return the runs as text, `start+count`, with a bar between groups."""
        return " | ".join(" ".join(f"{h.start}+{h.count}" for h in split_into_runs(t.blocks)) for t in self.tables)


def split_into_runs(blocks: Sequence[int]) -> list[KVHandle]:
    """Split block numbers into runs of consecutive ones, in the given order."""
    runs: list[KVHandle] = []
    for block in blocks:
        if runs and block == runs[-1].start + runs[-1].count:
            runs[-1] = KVHandle(runs[-1].start, runs[-1].count + 1)
        else:
            runs.append(KVHandle(block, 1))
    return runs


def _is_consecutive(blocks: list[int]) -> bool:
    return all(b == blocks[0] + i for i, b in enumerate(blocks))
