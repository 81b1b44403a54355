"""Index arrays and masks of a step for the reference backend, made once for all layers; and short prefill pieces in
batches.
"""

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
    """Index arrays, slots and masks that the reference backend derives from a step, cached for all layers."""

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._row_index: RowIndex | None = None
        self._slots: dict[int, mx.array] = {}
        self._masks: dict[int, mx.array] = {}
        self._causal: dict[tuple[int, int, int, int | None], mx.array] = {}
        self.ones: dict[int, mx.array] = {}

    @classmethod
    def from_handle(cls, kv: PagedKV) -> ReferenceStep:
        """Return the cached object of a handle's step."""
        return kv.derived.get(cls, kv.step)

    def row_index(self, heads: int, slab_blocks: int, block_size: int) -> RowIndex:
        """Return the index arrays of the step's single-token rows."""
        if self._row_index is None:
            queries, window = self._step.lengths[:, None] - 1, self._step.attention_window
            self._row_index = RowIndex(self._step.tables, queries, window, heads, slab_blocks, block_size)
        return self._row_index

    def oldest_token(self, piece: PrefillPiece) -> int:
        """Return the oldest token that any query of the piece sees. Earlier tokens are not read."""
        return self._step.attention_window.oldest_visible(piece.first)

    def slots(self, piece: PrefillPiece) -> mx.array:
        """Return the arena slots of a scattered piece from its oldest token on, `[seen tokens]` int32."""
        if piece.begin not in self._slots:
            assert piece.slots is not None
            self._slots[piece.begin] = mx.array(piece.slots[self.oldest_token(piece) :])
        return self._slots[piece.begin]

    def mask(self, piece: PrefillPiece) -> mx.array | str:
        """Return a piece's mask for MLX: `[queries, seen tokens]` bool, or "causal" if the last query sees all."""
        oldest_token = self.oldest_token(piece)
        if not piece.bidirectional and self._step.attention_window.oldest_visible(piece.tokens - 1) == oldest_token:
            return "causal"
        if piece.begin not in self._masks:
            end = piece.tokens if piece.bidirectional else None
            self._masks[piece.begin] = mx.array(self._visible_mask(piece.first, piece.tokens, oldest_token, end))
        return self._masks[piece.begin]

    def additive_mask(
        self, first: int, last: int, oldest_token: int, dtype: mx.Dtype, end: int | None = None
    ) -> mx.array:
        """Return the mask to add for queries `first .. last` on tokens `oldest_token .. last`: 0 if seen, else -inf.
        With an `end`, the mask is on tokens `oldest_token .. end`, and each query also sees tokens after itself.
        """
        key = (first, last, oldest_token, end)
        if key not in self._causal:
            visible = self._visible_mask(first, last, oldest_token, end)
            self._causal[key] = mx.array(np.where(visible, 0.0, -np.inf).astype(np.float32)).astype(dtype)
        return self._causal[key]

    def _visible_mask(self, first: int, last: int, oldest_token: int, end: int | None) -> npt.NDArray[np.bool_]:
        """Return, as bools, which tokens each of the queries `first .. last` sees: see `additive_mask`."""
        query, token = np.arange(first, last)[:, None], np.arange(oldest_token, last if end is None else end)
        in_window: npt.NDArray[np.bool_] = token >= self._step.attention_window.oldest_visible(query)
        return in_window if end is not None else in_window & (token <= query)

    @staticmethod
    def token_distances(first: int, last: int, oldest_token: int) -> mx.array:
        """Return distances `[queries, tokens]` float32: tokens `oldest_token .. last` minus queries `first .. last`."""
        return mx.arange(oldest_token, last, dtype=mx.float32) - mx.arange(first, last, dtype=mx.float32)[:, None]


class RowIndex:
    """The index arrays of some rows' blocks for gathered products, made once for all layers, and for all steps of a
    decode window. Each row has `blocks` blocks, from the oldest one that its queries see.

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
        tables, first = _trim_tables(tables, queries, attention_window, block_size)
        rows, self.blocks = tables.shape
        head = np.arange(heads, dtype=np.uint32)
        block = tables.astype(np.uint32)[:, None, :] + (head * slab_blocks)[None, :, None]
        row_head = np.arange(rows * heads, dtype=np.uint32).reshape(rows, heads, 1)
        self.block = mx.array(block)
        self.row_head = mx.array(np.broadcast_to(row_head, block.shape))
        self.weights_index = mx.arange(rows * heads * self.blocks, dtype=mx.uint32).reshape(rows, heads, self.blocks)
        self._position = first[:, None] * block_size + np.arange(self.blocks * block_size)
        self._visible: dict[int, mx.array] = {}
        self._distance: dict[int, mx.array] = {}

    def visible_mask(self, kv: PagedKV) -> mx.array:
        """Return which columns each query sees, `[rows, 1, queries, blocks * block_size + tail tokens]` bool."""
        tail_tokens = kv.tail_tokens
        if tail_tokens not in self._visible:
            query_position, position = self._queries[:, :, None], self._position[:, None]
            oldest_token = self._window.oldest_visible(np.maximum(query_position + tail_tokens, 0))
            arena_visible = (position <= query_position) & (position >= oldest_token)
            columns = query_position + 1 + np.arange(tail_tokens) >= oldest_token
            self._visible = {tail_tokens: mx.array(np.concatenate([arena_visible, columns], axis=2)[:, None])}
        return self._visible[tail_tokens]

    def token_distances(self, kv: PagedKV) -> mx.array:
        """Return the distance of each column of `visible_mask` from each query, in the same shape, float32: 0 for
        the query's own token, -1 for the token before.
        """
        tail_tokens = kv.tail_tokens
        if tail_tokens not in self._distance:
            columns = np.broadcast_to(np.arange(tail_tokens) - (tail_tokens - 1), (*self._queries.shape, tail_tokens))
            arena_distances = self._position[:, None] - (self._queries + tail_tokens)[:, :, None]
            distance = np.concatenate([arena_distances, columns], axis=2).astype(np.float32)
            self._distance = {tail_tokens: mx.array(distance[:, None])}
        return self._distance[tail_tokens]


def _trim_tables(
    tables: IntArray, queries: IntArray, attention_window: AttentionWindow, block_size: int
) -> tuple[IntArray, IntArray]:
    """Return block tables without the blocks that no query sees, and the index of each row's first block `[rows]`.

    A row with fewer blocks than others is filled up with the end of its table: padding, or its last block.
    """
    first = attention_window.oldest_visible(np.maximum(queries.min(axis=1), 0)) // block_size
    if not first.any():
        return tables, first
    width = int((queries.max(axis=1) // block_size + 1 - first).max())
    indices = np.minimum(first[:, None] + np.arange(width), tables.shape[1] - 1)
    return np.take_along_axis(tables, indices, axis=1), first


# Short pieces as batches of rows with several queries each, for the reference backend.
#
# A row that verifies drafts is a piece of a few tokens, and a step has as many of them as rows. One after the other,
# each would cost its own twenty operations in every layer.


MAX_SHORT_TOKENS = 16
"""The most tokens of a short piece."""

MIN_SEEN_TOKENS = 512
"""Pieces that see up to this many tokens share a batch: filling them up costs less than operations of their own."""


class PieceBatch:
    """Short prefill pieces that are computed together, each padded with its own last token to the longest length."""

    def __init__(self, pieces: Sequence[PrefillPiece], attention_window: AttentionWindow) -> None:
        self._pieces, self._window = pieces, attention_window
        self._index: RowIndex | None = None
        self.width = max(piece.end - piece.begin for piece in pieces)
        """Queries of each row."""
        self.flat = np.stack([np.minimum(np.arange(p.begin, p.begin + self.width), p.end - 1) for p in pieces])
        """The flat tokens of the queries, `[pieces, width]`."""

    @cached_property
    def _query_indices(self) -> mx.array | slice:
        """The flat indices of the batch's queries, as a slice where they are consecutive."""
        flat = self.flat.reshape(-1)
        in_order = bool((np.diff(flat) == 1).all())
        return slice(int(flat[0]), int(flat[-1]) + 1) if in_order else mx.array(flat.astype(np.int32))

    def select(self, queries: mx.array) -> mx.array:
        """Return the batch's part of a step's `queries`, `[pieces, query_heads, width, dim]`."""
        _, heads, _, dim = queries.shape
        return queries[self._query_indices].reshape(-1, self.width, heads, dim).swapaxes(1, 2)

    def row_index(self, heads: int, slab_blocks: int, block_size: int) -> RowIndex:
        """Return the index arrays of the pieces' blocks."""
        if self._index is None:
            tables = [piece.blocks(block_size) for piece in self._pieces]
            width = max(map(len, tables))
            padded = np.stack([np.pad(table, (0, width - len(table)), mode="edge") for table in tables])
            shift = np.array([piece.first - piece.begin for piece in self._pieces])
            positions = (self.flat + shift[:, None]).astype(np.int32)
            self._index = RowIndex(padded, positions, self._window, heads, slab_blocks, block_size)
        return self._index


class PieceBatches:
    """A step's prefill pieces, divided into batches of short ones and those computed one by one. A single short piece
    in scattered blocks is a batch too: batches multiply blocks in place, where a piece alone would copy its tokens.
    """

    def __init__(self, step: GroupStep) -> None:
        self.batches: list[PieceBatch] = []
        self.lone_pieces: list[PrefillPiece] = []
        for pieces in _group_similar(step):
            if len(pieces) > 1 or pieces[0].run is None:
                self.batches.append(PieceBatch(pieces, step.attention_window))
            else:
                self.lone_pieces += pieces
        self.lone_pieces += [piece for piece in step.pieces if not is_short(piece)]
        flat_tokens = [batch.flat.reshape(-1) for batch in self.batches]
        flat_tokens += [np.arange(piece.begin, piece.end) for piece in self.lone_pieces]
        _, order = np.unique(np.concatenate(flat_tokens), return_index=True)
        in_order = len(order) == sum(map(len, flat_tokens)) and bool((np.diff(order) == 1).all())
        self.order: mx.array | None = None if in_order else mx.array(order.astype(np.int32))
        """Where each token of the pieces is in the results of all batches, followed by those of the others; None: they
        are in order.
        """


def is_short(piece: PrefillPiece) -> bool:
    """Return whether a piece may be computed in a batch with others: it is short, and no image."""
    return piece.end - piece.begin <= MAX_SHORT_TOKENS and not piece.bidirectional


def _group_similar(step: GroupStep) -> Iterator[list[PrefillPiece]]:
    """Yield the short pieces in groups of similar length: within a group, none has, or sees, more than twice the
    tokens of another, so that padding costs less than it saves.
    """

    def seen_tokens(piece: PrefillPiece) -> int:
        return max(MIN_SEEN_TOKENS, piece.tokens - int(step.attention_window.oldest_visible(piece.first)))

    def length_class(piece: PrefillPiece) -> int:
        return (piece.end - piece.begin - 1).bit_length()

    group: list[PrefillPiece] = []
    for piece in sorted(filter(is_short, step.pieces), key=lambda piece: (length_class(piece), seen_tokens(piece))):
        if group and (length_class(group[0]) != length_class(piece) or seen_tokens(piece) > 2 * seen_tokens(group[0])):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
