"""GroupStep: where a step's keys and values are in the arena, as plain data for attention. Without mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import KVBlockError
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.types.arrays import IntArray


@dataclass(frozen=True)
class BlockCopy:
    """A block to copy, in every layer of `group`, before the target is read or written."""

    group: int
    source: int
    target: int


def make_copies(block_maps: Sequence[Mapping[int, int]]) -> tuple[BlockCopy, ...]:
    """Return the copies that bring the blocks of each group to their new numbers."""
    return tuple(
        BlockCopy(g, old, new) for g, numbers in enumerate(block_maps) for old, new in numbers.items() if old != new
    )


def copy_indices(copies: Sequence[BlockCopy], group: int) -> tuple[IntArray, IntArray]:
    """Return the source and target blocks of a group's copies, `[copies]` int32 each."""
    pairs = [(c.source, c.target) for c in copies if c.group == group]
    block_pairs = np.array(pairs, np.int32).reshape(-1, 2)
    return block_pairs[:, 0].copy(), block_pairs[:, 1].copy()


@dataclass(frozen=True)
class PrefillPiece:
    """A prefill piece: flat tokens `begin .. end` of the step, which are a row's tokens from `first` on."""

    begin: int
    end: int
    first: int
    run: KVHandle | None
    """The one run that has the keys and values of the row up to the piece's last token; None if they are scattered."""
    slots: npt.NDArray[np.int32] | None
    """Where these keys and values are if they are scattered, `[tokens]` int32."""
    both_ways: bool = False
    """Whether each query also sees the tokens after it, up to the piece's last one: those of an image may."""

    @property
    def tokens(self) -> int:
        """How many tokens of the row the piece's last query may see: all up to itself."""
        return self.first + self.end - self.begin

    def blocks(self, block_size: int) -> IntArray:
        """Return the row's blocks up to the piece's last token, `[blocks]` int32."""
        if self.run is not None:
            return np.arange(self.run.start, self.run.start - (-self.tokens // block_size), dtype=np.int32)
        assert self.slots is not None
        return (self.slots[::block_size] // block_size).astype(np.int32)


@dataclass(frozen=True)
class GroupStep:
    """Where a layer group finds the keys and values of a step: block tables and lengths of its decode rows, and its
    prefill pieces.

    In a windowed group, a row's tokens are counted from some token on, at or before the oldest one that its queries
    see. Earlier blocks may have been given up, and must not be read: a table has the null block for them, and a run may
    cover blocks of others.
    """

    tables: npt.NDArray[np.int32]
    """`[rows, blocks]` int32: the blocks of each single-token query. Padding entries are the null block."""
    lengths: npt.NDArray[np.int32]
    """`[rows]` int32: how many tokens of each such row are in the arena."""
    runs: tuple[KVHandle | None, ...]
    """The run of each such row if its blocks are one run, else None."""
    pieces: tuple[PrefillPiece, ...]
    """The prefill pieces."""
    attention_window: AttentionWindow
    """How far back the group's queries see."""
    listed: bool = False
    """Whether tables and lengths name only some blocks of their rows (`restrict_to_blocks`)."""

    @property
    def rows(self) -> int:
        """The number of single-token queries in the step."""
        return len(self.lengths)


def restrict_to_blocks(step: GroupStep, lists: Sequence[IntArray], block_size: int, null_block: int) -> GroupStep:
    """Return a step in which each single-token query attends only to some listed blocks of its row, and to the whole
    tail.

    `lists[row]` `[listed]` has the indices of these blocks in the row's table, ascending. It may be empty if there is a
    tail. The lists of a step may differ in length, and those of different groups and steps in everything. To the
    backends this is a shorter row: in any table, only the last block may be partly filled. If all blocks are listed,
    the result has the same bits as without a list. A step with lists needs a `StepDerivedData` of its own.

    A token's index in such a row is not its position. Keys that already contain their position (RoPE) allow that. A
    window or a chunk is refused here, because it counts positions. `paged_attention` refuses ALiBi's slopes, because
    distances could be meant with the gaps or without them (Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", 2024, section 3.2, leaves them out): a caller who needs either must say which.

    Raises:
        KVBlockError: the step has a window or chunks, or a list does not name blocks of its row in ascending order.
    """
    if step.attention_window.tokens is not None:
        kind = "chunks" if step.attention_window.chunked else "a window"
        raise KVBlockError(
            f"blocks are listed for layers with {kind} of {step.attention_window.tokens} tokens, which counts "
            "positions and not over gaps: list the blocks that are seen, in a step without either"
        )
    if len(lists) != step.rows:
        raise KVBlockError(f"there are {len(lists)} lists of blocks for {step.rows} rows: give each row one")
    tables = np.full((step.rows, max(map(len, lists), default=0)), null_block, np.int32)
    lengths, runs = np.zeros_like(step.lengths), list(step.runs)
    for row, (block_list, length) in enumerate(zip(lists, step.lengths.tolist(), strict=True)):
        blocks, count = -(-length // block_size), len(block_list)
        if count and not (block_list[0] >= 0 and block_list[-1] < blocks and (np.diff(block_list) > 0).all()):
            raise KVBlockError(
                f"row {row}'s list {np.asarray(block_list).tolist()} does not name some of its {blocks} blocks in "
                "ascending order: the kernels take all but the last for full"
            )
        tables[row, :count] = step.tables[row, block_list]
        empty_slots = blocks * block_size - length if count and block_list[-1] == blocks - 1 else 0
        lengths[row] = count * block_size - empty_slots
        if count < blocks:
            runs[row] = None
    return replace(step, tables=tables, lengths=lengths, runs=tuple(runs), listed=True)
