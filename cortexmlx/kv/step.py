"""GroupStep: where a step's keys and values are in the arena, as plain data for attention. Without mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    bidirectional: bool = False
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

    @property
    def rows(self) -> int:
        """The number of single-token queries in the step."""
        return len(self.lengths)
