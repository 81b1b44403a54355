"""Index arrays and masks of a step for the reference backend, made once for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.attention.paged import PagedKV
from cortexmlx.kv.spec import AttentionWindow
from cortexmlx.kv.step import GroupStep, PrefillPiece
from cortexmlx.types.arrays import IntArray


class ReferenceStep:
    """The arrays that this backend derives from a GroupStep, kept for all layers: those of the single-token queries,
    and of the prefill pieces.
    """

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._row_index: RowIndex | None = None
        self._slots: dict[int, mx.array] = {}
        self._masks: dict[int, mx.array] = {}
        self._causal: dict[tuple[int, int, int], mx.array] = {}
        self.ones: dict[int, mx.array] = {}

    @classmethod
    def of(cls, kv: PagedKV) -> ReferenceStep:
        """Return the arrays for a layer's step."""
        return kv.derived.get(cls, kv.step)

    def row_index(self, heads: int, slab_blocks: int, block_size: int) -> RowIndex:
        """Return the index arrays of the block tables."""
        if self._row_index is None:
            queries, window = self._step.lengths[:, None] - 1, self._step.attention_window
            self._row_index = RowIndex(self._step.tables, queries, window, heads, slab_blocks, block_size)
        return self._row_index

    def oldest(self, piece: PrefillPiece) -> int:
        """Return the oldest token that a query of the piece sees. Earlier tokens are not looked at."""
        return self._step.attention_window.oldest(piece.first)

    def slots(self, piece: PrefillPiece) -> mx.array:
        """Return the slots of a scattered piece from its oldest token on, `[seen tokens]` int32."""
        if piece.begin not in self._slots:
            assert piece.slots is not None
            self._slots[piece.begin] = mx.array(piece.slots[self.oldest(piece) :])
        return self._slots[piece.begin]

    def mask(self, piece: PrefillPiece) -> mx.array | str:
        """Return which tokens from the oldest on each query of a piece sees, for MLX's attention: `[queries, seen
        tokens]` bool, or "causal" if the last query sees all of them.
        """
        oldest = self.oldest(piece)
        if self._step.attention_window.oldest(piece.tokens - 1) == oldest:
            return "causal"
        if piece.begin not in self._masks:
            self._masks[piece.begin] = mx.array(self._seen(piece.first, piece.tokens, oldest))
        return self._masks[piece.begin]

    def causal(self, first: int, last: int, oldest: int, dtype: mx.Dtype) -> mx.array:
        """Return what to add to the scores of queries `first .. last` over tokens `oldest .. last`: 0, or minus
        infinity for tokens that a query may not see.
        """
        key = (first, last, oldest)
        if key not in self._causal:
            visible = self._seen(first, last, oldest)
            self._causal[key] = mx.array(np.where(visible, 0.0, -np.inf).astype(np.float32)).astype(dtype)
        return self._causal[key]

    def _seen(self, first: int, last: int, oldest: int) -> npt.NDArray[np.bool_]:
        """Return which of the tokens `oldest .. last` each of the queries `first .. last` sees."""
        query, token = np.arange(first, last)[:, None], np.arange(oldest, last)
        return (token <= query) & (token >= self._step.attention_window.oldest(query))

    @staticmethod
    def distance(first: int, last: int, oldest: int) -> mx.array:
        """Return how far the tokens `oldest .. last` are from each of the queries `first .. last`, `[queries, tokens]`
        float32: 0 for itself, -1 for the token before it.
        """
        return mx.arange(oldest, last, dtype=mx.float32) - mx.arange(first, last, dtype=mx.float32)[:, None]


class RowIndex:
    """The index arrays of some rows, made once for all layers, and of single tokens for all steps of a decode window.
    Each row has `blocks` blocks, from the oldest one that its queries see.

    `tables` `[rows, blocks]` are block tables. `queries` `[rows, queries]` are the positions of each row's queries
    while nothing of the row is in the tail. Each column of the tail makes them one more.
    """

    def __init__(
        self,
        tables: IntArray,
        queries: IntArray,
        attention_window: AttentionWindow,
        heads: int,
        slab_blocks: int,
        block_size: int,
    ) -> None:
        self._queries, self._window = queries, attention_window
        tables, first = _seen_blocks(tables, queries, attention_window, block_size)
        rows, self.blocks = tables.shape
        head = np.arange(heads, dtype=np.uint32)
        block = tables.astype(np.uint32)[:, None, :] + (head * slab_blocks)[None, :, None]
        row_head = np.arange(rows * heads, dtype=np.uint32).reshape(rows, heads, 1)
        self.block = mx.array(block)
        self.row_head = mx.array(np.broadcast_to(row_head, block.shape))
        self.each = mx.arange(rows * heads * self.blocks, dtype=mx.uint32).reshape(rows, heads, self.blocks)
        self._position = first[:, None] * block_size + np.arange(self.blocks * block_size)
        self._visible: dict[int, mx.array] = {}
        self._distance: dict[int, mx.array] = {}

    def visible(self, kv: PagedKV) -> mx.array:
        """Return which columns each query may see, `[rows, 1, queries, blocks * block_size + tail tokens]` bool."""
        tail = kv.tail_tokens
        if tail not in self._visible:
            newest, position = self._queries[:, :, None], self._position[:, None]
            oldest = self._window.oldest(np.maximum(newest + tail, 0))
            seen = (position <= newest) & (position >= oldest)
            columns = newest + 1 + np.arange(tail) >= oldest
            self._visible = {tail: mx.array(np.concatenate([seen, columns], axis=2)[:, None])}
        return self._visible[tail]

    def distance(self, kv: PagedKV) -> mx.array:
        """Return how far the columns of `visible` are from each query, in the same shape, float32: 0 for itself, -1 for
        the token before it.
        """
        tail = kv.tail_tokens
        if tail not in self._distance:
            columns = np.broadcast_to(np.arange(tail) - (tail - 1), (*self._queries.shape, tail))
            before = self._position[:, None] - (self._queries + tail)[:, :, None]
            distance = np.concatenate([before, columns], axis=2).astype(np.float32)
            self._distance = {tail: mx.array(distance[:, None])}
        return self._distance[tail]


def _seen_blocks(
    tables: IntArray, queries: IntArray, attention_window: AttentionWindow, block_size: int
) -> tuple[IntArray, IntArray]:
    """Return tables without the blocks before all that is seen, and the index of each row's first block `[rows]`.

    A row with fewer blocks than others is filled up with the end of its table: padding, or its last block.
    """
    first = attention_window.oldest(np.maximum(queries.min(axis=1), 0)) // block_size
    if not first.any():
        return tables, first
    width = int((queries.max(axis=1) // block_size + 1 - first).max())
    places = np.minimum(first[:, None] + np.arange(width), tables.shape[1] - 1)
    return np.take_along_axis(tables, places, axis=1), first


# Short pieces as batches of rows with several queries each, for the reference backend.
#
# A row that verifies drafts is a piece of a few tokens, and a step has as many of them as rows. One after the other,
# each would cost its own twenty operations in every layer.


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
