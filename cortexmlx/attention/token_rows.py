"""The shortest pieces of a step as rows of one token each, for the decode kernels.

A row that verifies a few drafts is such a piece. As rows, all of them and the decoding rows are one launch, which cuts
a row into partitions, reads any blocks and knows every window and option. Each token gets the bits that it would get if
it were decoded alone. The price: the keys and values of a row are read once for each of its tokens.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from cortexmlx.attention.paged import Derived
from cortexmlx.kv.step import GroupStep, PrefillPiece

FEW = 4
"""The most tokens of a piece that become rows. Tiles of a prefill kernel have 8 queries or more, and would be half
empty. More rows would read more than what they save.
"""


class TokenRows:
    """A step whose pieces of up to `FEW` tokens are rows."""

    def __init__(self, step: GroupStep) -> None:
        self._whole = step
        self._few = [piece for piece in step.pieces if piece.end - piece.begin <= FEW]
        self._others = [piece for piece in step.pieces if piece.end - piece.begin > FEW]
        self._step: GroupStep | None = None
        self._order: mx.array | None = None
        self._back: mx.array | None = None
        self.derived = Derived()
        self._put_in_order()

    def __bool__(self) -> bool:
        """Whether there are such pieces."""
        return bool(self._few)

    def step(self, block_size: int, null_block: int) -> GroupStep:
        """Return the step. Its queries are in the order of `taken`."""
        if self._step is None:
            self._step = self._made(block_size, null_block)
        return self._step

    def taken(self, queries: mx.array) -> mx.array:
        """Return the flat queries of the whole step in the order of this one."""
        return queries if self._order is None else queries[self._order]

    def put_back(self, attended: mx.array) -> mx.array:
        """Return results of this step in the order of the whole one."""
        return attended if self._back is None else attended[self._back]

    def _put_in_order(self) -> None:
        flat = [np.arange(piece.begin, piece.end) for piece in (*self._few, *self._others)]
        order = np.concatenate([np.arange(self._whole.rows), *flat]).astype(np.int32)
        if (np.diff(order) != 1).any():
            self._order, self._back = mx.array(order), mx.array(np.argsort(order).astype(np.int32))

    def _made(self, block_size: int, null_block: int) -> GroupStep:
        whole = self._whole
        counts = [piece.end - piece.begin for piece in self._few]
        blocks = [piece.blocks(block_size) for piece in self._few]
        width = max(whole.tables.shape[1], *map(len, blocks))
        tables = np.full((whole.rows + sum(counts), width), null_block, np.int32)
        tables[: whole.rows, : whole.tables.shape[1]] = whole.tables
        begin = whole.rows
        for count, own in zip(counts, blocks, strict=True):
            tables[begin : begin + count, : len(own)] = own
            begin += count
        lengths = [np.arange(piece.first + 1, piece.tokens + 1) for piece in self._few]
        others: list[PrefillPiece] = []
        for piece in self._others:
            others.append(replace(piece, begin=begin, end=begin + piece.end - piece.begin))
            begin = others[-1].end
        return replace(
            whole,
            tables=tables,
            lengths=np.concatenate([whole.lengths, *lengths]).astype(np.int32),
            runs=(*whole.runs, *[None] * sum(counts)),
            pieces=tuple(others),
        )
