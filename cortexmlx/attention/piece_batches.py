"""Short pieces as batches of rows with several queries each, for the reference backend.

A row that verifies drafts is a piece of a few tokens, and a step has as many of them as rows. One after the other, each
would cost its own twenty operations in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from cortexmlx.attention.reference_step import RowIndex
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import GroupStep, PrefillPiece

SHORT = 16
"""The most tokens of a short piece."""

LEAST_SEEN = 512
"""Pieces that see up to this many tokens share a batch: filling them up costs less than operations of their own."""


class PieceBatch:
    """Short pieces that are computed together. Each is filled up with its own last token, to the longest of them."""

    def __init__(self, pieces: Sequence[PrefillPiece], attention_window: AttentionWindow) -> None:
        self._pieces, self._window = pieces, attention_window
        self._index: RowIndex | None = None
        self.width = max(piece.end - piece.begin for piece in pieces)
        """Queries of each row."""
        self.flat = np.stack([np.minimum(np.arange(p.begin, p.begin + self.width), p.end - 1) for p in pieces])
        """The flat tokens of the queries, `[pieces, width]`."""

    @cached_property
    def _flat(self) -> mx.array | slice:
        flat = self.flat.reshape(-1)
        in_order = bool((np.diff(flat) == 1).all())
        return slice(int(flat[0]), int(flat[-1]) + 1) if in_order else mx.array(flat.astype(np.int32))

    def queries(self, queries: mx.array) -> mx.array:
        """Return these of a step's `queries`, `[pieces, query_heads, width, dim]`."""
        _, heads, _, dim = queries.shape
        return queries[self._flat].reshape(-1, self.width, heads, dim).swapaxes(1, 2)

    def index(self, heads: int, slab_blocks: int, block_size: int) -> RowIndex:
        """Return the index arrays of the pieces' blocks."""
        if self._index is None:
            tables = [piece.blocks(block_size) for piece in self._pieces]
            width = max(map(len, tables))
            padded = np.stack([np.pad(table, (0, width - len(table)), mode="edge") for table in tables])
            shift = np.array([piece.first - piece.begin for piece in self._pieces])
            positions = (self.flat + shift[:, None]).astype(np.int32)
            self._index = RowIndex(padded, positions, self._window, heads, slab_blocks, block_size)
        return self._index


class CutPieces:
    """The pieces of a step: short ones in batches, and those that are computed one by one. A lone short piece is a
    batch too if its tokens are scattered, because blocks are multiplied where they are and slots must be copied.
    """

    def __init__(self, step: GroupStep) -> None:
        self.batches: list[PieceBatch] = []
        self.alone: list[PrefillPiece] = []
        for pieces in _alike(step):
            if len(pieces) > 1 or pieces[0].run is None:
                self.batches.append(PieceBatch(pieces, step.attention_window))
            else:
                self.alone += pieces
        self.alone += [piece for piece in step.pieces if not is_short(piece)]
        found = [batch.flat.reshape(-1) for batch in self.batches]
        found += [np.arange(piece.begin, piece.end) for piece in self.alone]
        _, order = np.unique(np.concatenate(found), return_index=True)
        in_order = len(order) == sum(map(len, found)) and bool((np.diff(order) == 1).all())
        self.order: mx.array | None = None if in_order else mx.array(order.astype(np.int32))
        """Where each token of the pieces is in the results of all batches, followed by those of the others; None: they
        are in order.
        """


def is_short(piece: PrefillPiece) -> bool:
    """Return whether a piece may be computed with others."""
    return piece.end - piece.begin <= SHORT


def _alike(step: GroupStep) -> Iterator[list[PrefillPiece]]:
    """Yield the short pieces in groups. In a group, none has more than twice the tokens of another, or sees more than
    twice as many, so that filling them up costs less than it saves.
    """

    def seen(piece: PrefillPiece) -> int:
        return max(LEAST_SEEN, piece.tokens - int(step.attention_window.oldest(piece.first)))

    def tokens(piece: PrefillPiece) -> int:
        return (piece.end - piece.begin - 1).bit_length()

    group: list[PrefillPiece] = []
    for piece in sorted(filter(is_short, step.pieces), key=lambda piece: (tokens(piece), seen(piece))):
        if group and (tokens(group[0]) != tokens(piece) or seen(piece) > 2 * seen(group[0])):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
