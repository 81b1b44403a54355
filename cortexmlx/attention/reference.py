"""The reference backend: paged attention in plain MLX operations. The CPU path, the GPU's fallback and the kernels'
judge.

Single-token queries use `mx.gather_mm`, which multiplies blocks where they lie: the slab is reshaped (free) to matrices
`[kv_heads * blocks, block_size, dim]` and the block table selects them. Whole blocks are read, so what lies behind a
row's last token is excluded by selection, and blocks are zero-filled when they are opened because `0 * NaN` is NaN.

Prefill pieces use MLX's own attention over a view of the row's run, or over one gather of its slots when it has
several.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from cortexmlx.attention.paged import GroupStep, PagedKV, Piece
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import Slab


def attend(
    queries: mx.array, kv: PagedKV, *, scale: float, sinks: mx.array | None = None, softcap: float | None = None
) -> mx.array:
    """See `paged_attention`."""
    rows = kv.step.rows
    parts = []
    if rows == 1 and kv.step.runs[0] is not None:
        parts.append(_attend_run(queries[:1], kv, kv.step.runs[0], scale, sinks, softcap))
    elif rows:
        parts.append(_attend_rows(queries[:rows], kv, scale, sinks, softcap))
    parts += attend_pieces(queries, kv, scale, sinks, softcap)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def attend_pieces(
    queries: mx.array, kv: PagedKV, scale: float, sinks: mx.array | None, softcap: float | None
) -> list[mx.array]:
    """Attention of the step's prefill pieces alone, `[tokens of the piece, query_heads, 1, value_dim]` each.

    `queries` are those of the whole step. Used by every backend.
    """
    return [_attend_piece(queries[p.begin : p.end], kv, p, scale, sinks, softcap) for p in kv.step.pieces]


def _attend_rows(
    queries: mx.array, kv: PagedKV, scale: float, sinks: mx.array | None, softcap: float | None
) -> mx.array:
    """Many rows, one query each: blocks by `gather_mm`, the tail by an ordinary product, one softmax over both."""
    keys, values = kv.arena.blocks_of(kv.layer)
    heads = kv.arena.slab(kv.layer)[0].shape[0]
    rows, query_heads, _, dim = queries.shape
    group = query_heads // heads
    index = _RowIndex.of(kv.step, heads, keys.shape[0] // heads)
    blocks, block_size = kv.step.tables.shape[1], kv.arena.block_size
    span = blocks * block_size

    q = queries.reshape(rows, heads, group, dim) * scale
    scores = mx.gather_mm(q.reshape(-1, group, dim), keys.swapaxes(-1, -2), index.row_head, index.block)
    scores = scores.swapaxes(2, 3).reshape(rows, heads, group, span)
    if kv.tail is not None:
        tail_keys, tail_values = (t[:, :, : kv.tail_tokens] for t in kv.tail)
        scores = mx.concatenate([scores, q @ tail_keys.swapaxes(-1, -2)], axis=-1)
    weights = _softmax(scores, index.visible(kv), sinks, softcap)
    spread = weights[..., :span].reshape(rows, heads, group, blocks, block_size).swapaxes(2, 3)
    out = mx.gather_mm(spread.reshape(-1, group, block_size), values, index.each, index.block).sum(axis=2)
    if kv.tail is not None:
        out = out + weights[..., span:] @ tail_values
    return out.reshape(rows, query_heads, 1, -1).astype(queries.dtype)


class _RowIndex:
    """The index arrays of a step's block tables, made once for all layers and all steps of a decode window."""

    def __init__(self, step: GroupStep, heads: int, slab_blocks: int) -> None:
        rows, blocks = step.tables.shape
        head = np.arange(heads, dtype=np.uint32)
        block = step.tables.astype(np.uint32)[:, None, :] + (head * slab_blocks)[None, :, None]
        row_head = np.arange(rows * heads, dtype=np.uint32).reshape(rows, heads, 1)
        self.block = mx.array(block)
        self.row_head = mx.array(np.broadcast_to(row_head, block.shape))
        self.each = mx.arange(rows * heads * blocks, dtype=mx.uint32).reshape(rows, heads, blocks)
        self._step = step
        self._visible: dict[int, mx.array] = {}

    @classmethod
    def of(cls, step: GroupStep, heads: int, slab_blocks: int) -> _RowIndex:
        if "rows" not in step.memo:
            step.memo["rows"] = cls(step, heads, slab_blocks)
        index: _RowIndex = step.memo["rows"]
        return index

    def visible(self, kv: PagedKV) -> mx.array:
        """Which columns each row may see, `[rows, 1, 1, blocks * block_size + tail tokens]` bool."""
        tail = kv.tail_tokens
        if tail not in self._visible:
            lengths = self._step.lengths[:, None]
            position = np.arange(self._step.tables.shape[1] * kv.arena.block_size)[None, :]
            seen = position < lengths
            if self._step.window is not None:
                seen &= position >= lengths + tail - self._step.window
            columns = np.ones((len(lengths), tail), bool)
            if self._step.window is not None:
                columns &= np.arange(tail)[None, :] >= tail - self._step.window
            self._visible = {tail: mx.array(np.concatenate([seen, columns], axis=1)[:, None, None, :])}
        return self._visible[tail]


def _attend_run(
    queries: mx.array, kv: PagedKV, run: KVHandle, scale: float, sinks: mx.array | None, softcap: float | None
) -> mx.array:
    """A lone row whose tokens are one run: a view of the arena instead of gathered blocks."""
    length, tail = int(kv.step.lengths[0]), kv.tail_tokens
    first = 0 if kv.step.window is None else max(0, length + tail - kv.step.window)
    begin = min(first, length)
    keys, values = (a[:, begin:] for a in kv.arena.view(kv.layer, run, length))
    heads = keys.shape[0]
    _, query_heads, _, dim = queries.shape
    q = queries.reshape(heads, query_heads // heads, dim) * scale
    scores = q @ keys.swapaxes(-1, -2)
    if kv.tail is not None:
        tail_keys, tail_values = (t[0, :, first - begin : tail] for t in kv.tail)
        scores = mx.concatenate([scores, q @ tail_keys.swapaxes(-1, -2)], axis=-1)
    weights = _softmax(scores[None], None, sinks, softcap)[0]
    out = weights[..., : length - begin] @ values
    if kv.tail is not None:
        out = out + weights[..., length - begin :] @ tail_values
    return out.reshape(1, query_heads, 1, -1).astype(queries.dtype)


def _attend_piece(
    queries: mx.array, kv: PagedKV, piece: Piece, scale: float, sinks: mx.array | None, softcap: float | None
) -> mx.array:
    """Consecutive queries of one row over all its tokens up to them, causal and within the window."""
    keys, values = _piece_kv(kv, piece)
    q = queries.swapaxes(0, 2)
    mask = _piece_mask(kv.step, piece)
    if softcap is None:
        out = mx.fast.scaled_dot_product_attention(q, keys[None], values[None], scale=scale, mask=mask, sinks=sinks)
        return out.swapaxes(0, 2)
    heads, (_, query_heads, count, dim) = keys.shape[0], q.shape
    grouped = q.reshape(heads, query_heads // heads, count, dim) * scale
    scores = grouped @ keys[:, None].swapaxes(-1, -2)
    visible = mx.tri(count, piece.tokens, piece.first, dtype=mx.bool_) if isinstance(mask, str) else mask
    weights = _softmax(scores, visible, None if sinks is None else sinks.reshape(heads, -1, 1), softcap)
    return (weights @ values[:, None]).reshape(1, query_heads, count, -1).swapaxes(0, 2)


def _piece_kv(kv: PagedKV, piece: Piece) -> Slab:
    if piece.run is not None:
        return kv.arena.view(kv.layer, piece.run, piece.tokens)
    key = f"slots {piece.begin}"
    if key not in kv.step.memo:
        assert piece.slots is not None
        kv.step.memo[key] = mx.array(piece.slots)
    return tuple(mx.take(a, kv.step.memo[key], axis=1) for a in kv.arena.slab(kv.layer))


def _piece_mask(step: GroupStep, piece: Piece) -> mx.array | str:
    if step.window is None or piece.tokens <= step.window:
        return "causal"
    key = f"mask {piece.begin}"
    if key not in step.memo:
        query = np.arange(piece.first, piece.tokens)[:, None]
        seen = np.arange(piece.tokens)[None, :]
        step.memo[key] = mx.array((seen <= query) & (seen > query - step.window))
    mask: mx.array = step.memo[key]
    return mask


def _softmax(scores: mx.array, visible: mx.array | None, sinks: mx.array | None, softcap: float | None) -> mx.array:
    """Softmax over the last axis of `[..., heads, group, columns]`, of the visible columns and the sinks."""
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if visible is not None:
        scores = mx.where(visible, scores, mx.array(-mx.inf, scores.dtype))
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    heads, group = scores.shape[1], scores.shape[2]
    extra = mx.broadcast_to(sinks.astype(scores.dtype).reshape(1, heads, group, 1), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1, precise=True)[..., :-1]
