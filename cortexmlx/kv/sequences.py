"""The block tables of all sequences, and what a step reads of them. Pure Python and NumPy, no mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.sizing import row_blocks
from cortexmlx.kv.spec import Counts
from cortexmlx.kv.table import SequenceBlocks
from cortexmlx.types.arrays import IntArray

_UNLIMITED = 1 << 40
"""Tokens of a sequence whose length costs no memory: more than any model's context."""


class SequenceTables:
    """The sequences of a cache, each with a block table per layer group. Their blocks are those of `pools`.

    The caller chooses the number of a sequence. `KVCache` begins, grows and ends sequences.
    """

    def __init__(self, pools: BlockPools) -> None:
        self._pools = pools
        self._block_size = pools.block_size
        self.sequences: dict[int, SequenceBlocks] = {}
        """The tables of each sequence, by its number."""
        self.most_blocks = [row_blocks(group.spec.attention_window, self._block_size) for group in pools.groups]
        """How many blocks of each group a sequence can have; None in a group that sees all tokens."""
        self.windowed = [group for group, most in enumerate(self.most_blocks) if most is not None]
        """The groups that see a window of the tokens."""

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens: `ceil(tokens / block_size)`."""
        return -(-tokens // self._block_size)

    def front(self, group: int, position: int) -> int:
        """Return the index of the first block that a query at `position` sees."""
        return self._pools.groups[group].spec.attention_window.first_block(position, self._block_size)

    # -- one sequence -------------------------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """Return the number of tokens of a sequence."""
        return self.sequences[seq].length

    def block_table(self, seq: int, group: int) -> IntArray:
        """Return a sequence's blocks in token order, `[blocks]` int32. A windowed group has given up the first ones."""
        return self.sequences[seq].tables[group].array()

    def row(self, seq: int, group: int, tokens: int, begin: int = 0) -> IntArray:
        """Return the blocks of tokens `begin .. tokens`, `[blocks]` int32, with the null block for each block that was
        given up. `begin` is the first token of a block.
        """
        table = self.sequences[seq].tables[group]
        return table.row(begin // self._block_size, self.blocks_for(tokens), self._pools.null_block(group))

    def run(self, seq: int, group: int, tokens: int, begin: int = 0) -> KVHandle | None:
        """Return the one run that holds tokens `begin .. tokens`, or None if they are in several runs.

        A run may begin with blocks that the sequence has given up. They belong to others, and must not be read.
        """
        return self.sequences[seq].tables[group].run(begin // self._block_size, self.blocks_for(tokens))

    def slots(self, seq: int, group: int, start: int, count: int) -> IntArray:
        """Return the flat slots `block * block_size + offset` of tokens `start .. start + count`, `[count]` int32. A
        token whose block was given up has a slot of the null block.
        """
        null = self._pools.null_block(group)
        return self.sequences[seq].tables[group].slots(start, count, self._block_size, null)

    def passed(self, seq: int, tokens: int) -> bool:
        """Return whether a window has given up blocks that the token after a sequence's first `tokens` tokens sees."""
        tables = self.sequences[seq].tables
        return any(tables[group].first > self.front(group, tokens) for group in self.windowed)

    def ends_within(self, sequence: SequenceBlocks, end: int) -> list[int]:
        """Return the end that each group's table gets for a sequence of `end` blocks: less in a windowed group, since
        no sequence has more than `most_blocks` there.
        """
        pairs = zip(sequence.tables, self.most_blocks, strict=True)
        return [end if most is None else min(end, table.first + most) for table, most in pairs]

    def describe(self, seq: int) -> str:
        """Return a sequence's blocks as text for people: its runs as `start+count`, with a bar between groups."""
        return self.sequences[seq].describe()

    # -- room for others ----------------------------------------------------------------------------------------------

    def can_obtain(
        self, blocks: Sequence[int], promised: Mapping[int, int] | None = None, transient: bool = False
    ) -> bool:
        """Return whether a new sequence can get `blocks` blocks of each group; see `obtainable_beside`."""
        counts = self.obtainable_beside(promised or {}, transient)
        return all(needed <= n for needed, n in zip(blocks, counts, strict=True))

    def obtainable_beside(self, promised: Mapping[int, int], transient: bool = False) -> list[int]:
        """Return how many blocks of each group a new sequence can get if sequences give back spare blocks.

        A `transient` one evicts nothing that others have cached. `promised` has the tokens for which a sequence keeps
        room. It gives back the blocks beyond these tokens and beyond its length.
        """
        kept = {seq: self.blocks_for(max(tokens, self.length(seq))) for seq, tokens in promised.items()}
        counts = []
        for group in range(len(self._pools.groups)):
            tables = ((self.sequences[seq].tables[group], end) for seq, end in kept.items())
            spare = sum(min(max(0, table.end - end), len(table.blocks)) for table, end in tables)
            counts.append(self._pools.obtainable(group, transient) + spare)
        return counts

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence alone could have now. The system may refuse the cache more memory for a while."""
        return self._tokens_in(self._pools.max_blocks)

    @property
    def configured_tokens(self) -> int:
        """Tokens that one sequence alone could have if the system gives the memory."""
        return self._tokens_in(self._pools.configured_blocks)

    def _tokens_in(self, blocks: Counts) -> int:
        pairs = zip(blocks, self.most_blocks, strict=True)
        counts = (_UNLIMITED if most is not None and most <= n else n * self._block_size for n, most in pairs)
        return min(counts)
