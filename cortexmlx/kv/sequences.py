"""The block tables of all sequences, and what a step needs to know of them. Pure Python and NumPy, no mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.arrays import IntArray
from cortexmlx.kv.blocks.allocator import KVHandle
from cortexmlx.kv.blocks.pools import BlockPools
from cortexmlx.kv.blocks.table import SequenceBlocks
from cortexmlx.kv.invariants import CacheStats, block_map, cache_stats
from cortexmlx.kv.sizing import row_blocks
from cortexmlx.kv.spec import LayerGroup
from cortexmlx.stats import BlockMap

_UNLIMITED = 1 << 40
"""Tokens of a sequence whose length costs no memory: more than any model's context."""


class SequenceTables(BlockPools):
    """The sequences, by an integer of the caller's choice, with a table of blocks in each group."""

    def __init__(
        self, groups: Sequence[LayerGroup], blocks: int | Sequence[int], block_size: int, **options: Any
    ) -> None:
        super().__init__(groups, blocks, block_size, **options)
        self._sequences: dict[int, SequenceBlocks] = {}
        self._most = [row_blocks(group.spec.attention_window, block_size) for group in groups]
        self._windows = [g for g, most in enumerate(self._most) if most is not None]

    @property
    def grows(self) -> bool:
        """Whether a token takes memory: some layer keeps its keys and values."""
        return any(group.layers for group in self.groups)

    # -- what a step needs to know ------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens: `ceil(tokens / block_size)`."""
        return -(-tokens // self.block_size)

    @property
    def sequences(self) -> set[int]:
        """The sequences that have blocks."""
        return set(self._sequences)

    def length(self, seq: int) -> int:
        """Tokens of the sequence."""
        return self._sequences[seq].length

    def block_table(self, seq: int, group: int) -> IntArray:
        """The sequence's blocks in token order, `[blocks]` int32; in a group of windows, those that it still has."""
        return self._sequences[seq].tables[group].array()

    def row(self, seq: int, group: int, tokens: int, begin: int = 0) -> IntArray:
        """The blocks of tokens `begin .. tokens`, `[blocks]` int32; the null block for those that are given up. `begin`
        is the first token of a block.
        """
        table = self._sequences[seq].tables[group]
        return table.row(begin // self.block_size, self.blocks_for(tokens), self.null_block(group))

    def run(self, seq: int, group: int, tokens: int, begin: int = 0) -> KVHandle | None:
        """The run that tokens `begin .. tokens` are, or None if they lie in more than one. Where blocks are given up,
        nobody may look at what lies in their place.
        """
        return self._sequences[seq].tables[group].run(begin // self.block_size, self.blocks_for(tokens))

    def slots(self, seq: int, group: int, start: int, count: int) -> IntArray:
        """The flat slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32; the null
        block's for those that are given up.
        """
        return self._sequences[seq].tables[group].slots(start, count, self.block_size, self.null_block(group))

    # -- looking inside -----------------------------------------------------------------------------------------------

    def can_obtain(self, blocks: Sequence[int], promised: Mapping[int, int] | None = None) -> bool:
        """Whether a new sequence can count on so many blocks of each group, if each of the sequences `promised` gave
        back its blocks beyond so many tokens or its length.
        """
        return all(needed <= n for needed, n in zip(blocks, self.obtainable_beside(promised or {}), strict=True))

    def obtainable_beside(self, promised: Mapping[int, int]) -> list[int]:
        """How many blocks of each group a new sequence can count on, if each of the sequences `promised` gave back its
        blocks beyond so many tokens or its length.
        """
        kept = {seq: self.blocks_for(max(n, self.length(seq))) for seq, n in promised.items()}
        counts = []
        for group in range(len(self.groups)):
            tables = ((self._sequences[seq].tables[group], places) for seq, places in kept.items())
            spare = sum(min(max(0, table.end - places), len(table.blocks)) for table, places in tables)
            counts.append(self.obtainable(group) + spare)
        return counts

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence alone could have."""
        pairs = zip(self.max_blocks, self._most, strict=True)
        return min(_UNLIMITED if most is not None and most <= n else n * self.block_size for n, most in pairs)

    def stats(self) -> CacheStats:
        """Counts over all groups, at this moment."""
        return cache_stats(self._pools, self._sequences)

    def block_map(self) -> BlockMap:
        """Whose every block is, at this moment."""
        return block_map(self.block_size, self.groups, self._pools, self.max_blocks)

    def describe(self, seq: int) -> str:
        """A sequence's blocks for people: its runs as `start+count`, groups separated by bars."""
        return self._sequences[seq].describe()

    def _front(self, group: int, position: int) -> int:
        """The place of the first block that a query at a position sees."""
        return self.groups[group].spec.attention_window.first_block(position, self.block_size)
