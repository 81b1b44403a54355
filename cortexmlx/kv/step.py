"""GroupStep: where the keys and values of a step lie, as plain data for attention. No mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cortexmlx.arrays import IntArray
from cortexmlx.errors import KVBlockError
from cortexmlx.kv.attention_window import AttentionWindow
from cortexmlx.kv.blocks.allocator import KVHandle


@dataclass(frozen=True)
class BlockCopy:
    """A block whose bytes must be copied, in every layer of `group`, before the target is read or written."""

    group: int
    source: int
    target: int


def copies_of(moved: Sequence[Mapping[int, int]]) -> tuple[BlockCopy, ...]:
    """The copies that bring the blocks of each group to their new numbers."""
    return tuple(
        BlockCopy(g, old, new) for g, numbers in enumerate(moved) for old, new in numbers.items() if old != new
    )


def in_group(copies: Sequence[BlockCopy], group: int) -> tuple[IntArray, IntArray]:
    """The sources and the targets of the copies in a group, `[copies]` int32 each."""
    pairs = [(c.source, c.target) for c in copies if c.group == group]
    both = np.array(pairs, np.int32).reshape(-1, 2)
    return both[:, 0].copy(), both[:, 1].copy()


@dataclass(frozen=True)
class PrefillPiece:
    """A prefill piece: flat tokens `begin .. end` are a row's tokens `first .. first + end - begin`.

    Its keys and values up to its last token lie in `run`, or, scattered, in `slots` (`[tokens]` int32).
    """

    begin: int
    end: int
    first: int
    run: KVHandle | None
    slots: npt.NDArray[np.int32] | None

    @property
    def tokens(self) -> int:
        """Tokens of the row that the piece's last query sees, itself included."""
        return self.first + self.end - self.begin


@dataclass(frozen=True)
class GroupStep:
    """Where one layer group finds the keys and values of a step.

    In a group of windows a row's tokens are counted from some token on, not later than the oldest that its queries of
    the step see; what lies before that may be gone, and must not be looked at: a table names the null block there, and
    a run may be another's.

    `tables` `[rows, blocks]` int32 and `lengths` `[rows]` describe the arena part of the single-token queries;
    padding entries of a table name the null block. `runs` has a row's run where it is a single one.
    `attention_window` is the group's. `listed` says that tables and lengths are those of listed blocks (`only_blocks`).
    """

    tables: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    runs: tuple[KVHandle | None, ...]
    pieces: tuple[PrefillPiece, ...]
    attention_window: AttentionWindow
    listed: bool = False

    @property
    def rows(self) -> int:
        """How many single-token queries the step has."""
        return len(self.lengths)


def only_blocks(step: GroupStep, lists: Sequence[IntArray], block_size: int, null_block: int) -> GroupStep:
    """The step in which single-token queries attend to some of their row's blocks only, and to the whole tail.

    `lists[row]` `[listed]` has the places of these blocks in the row's table, ascending; it may be empty if there is a
    tail. Lists of a step may differ in length, and those of layer groups and steps in everything. For the backends this
    is a shorter row: they read any table whose last block alone is partly filled, and with all blocks listed a result
    has the same bits as without a list. A step of lists needs a `Derived` of its own.

    A token's place in such a row is not its position. What has its position in the key already (RoPE) does not mind. A
    window or a chunk is refused here, because it counts positions; so are ALiBi's slopes by `paged_attention`, because
    distances across gaps may be meant, or those within what is kept (Xiao et al., "Efficient Streaming Language Models
    with Attention Sinks", 2024, section 3.2, rolls them up): whoever needs either must say which.

    Raises:
        KVBlockError: the step has a window or chunks, or a list is not one of the row's blocks in ascending order.
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
    for row, (listed, length) in enumerate(zip(lists, step.lengths.tolist(), strict=True)):
        blocks, count = -(-length // block_size), len(listed)
        if count and not (listed[0] >= 0 and listed[-1] < blocks and (np.diff(listed) > 0).all()):
            raise KVBlockError(
                f"row {row}'s list {np.asarray(listed).tolist()} does not name some of its {blocks} blocks in "
                "ascending order: the kernels take all but the last for full"
            )
        tables[row, :count] = step.tables[row, listed]
        unfilled = blocks * block_size - length if count and listed[-1] == blocks - 1 else 0
        lengths[row] = count * block_size - unfilled
        if count < blocks:
            runs[row] = None
    return replace(step, tables=tables, lengths=lengths, runs=tuple(runs), listed=True)
