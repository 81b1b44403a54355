"""A sequence's block tables: its blocks in token order, one table per layer group. Knows nothing of other sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cortexmlx.arrays import IntArray
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.prefix import Blocks, Node


class BlockTable:
    """One sequence's blocks in one group, in token order."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def array(self) -> IntArray:
        """The blocks, `[blocks]` int32."""
        return np.array(self.blocks, np.int32)

    def single_run(self) -> bool:
        """Whether the blocks are consecutive; none are."""
        return not self.blocks or _ascending(self.blocks)

    def run(self, count: int) -> KVHandle | None:
        """The run that the first `count` blocks are, or None if they are more than one, or none."""
        blocks = self.blocks[:count]
        return KVHandle(blocks[0], len(blocks)) if blocks and _ascending(blocks) else None

    def slots(self, start: int, count: int, block_size: int) -> IntArray:
        """The flat slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32."""
        positions = np.arange(start, start + count)
        first, last = start // block_size, -(-(start + count) // block_size)
        table = np.array(self.blocks[first:last], np.int64)
        block = table[positions // block_size - first] if count else positions
        return (block * block_size + positions % block_size).astype(np.int32)

    def cut(self, keep: int) -> list[int]:
        """Take the blocks behind the first `keep` out of the table, and return them."""
        rest = self.blocks[keep:]
        del self.blocks[keep:]
        return rest


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
        """The block of each group at `index`: they hold the same tokens."""
        return tuple(table.blocks[index] for table in self.tables)

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
