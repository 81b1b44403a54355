"""The reference backend: paged attention in plain MLX operations. It is the CPU's path and the GPU's fallback.

Single-token queries use `mx.gather_mm`, which multiplies blocks where they are. The slab is reshaped (at no cost) to
matrices `[kv_heads * blocks, block_size, dim]`, and the block table selects them. Whole blocks are read, so tokens
after a row's last one are excluded by selection. A block is filled with zeros when its first token is written, because
`0 * NaN` is NaN. Quantized blocks are multiplied in place, too, by `mx.gather_qmm`, or on a CPU by `quantized.py`. What
a longer piece sees is dequantized.

Short prefill pieces, of rows that verify drafts for example, are rows with several queries, all in one batch
(`pieces/piece_batches.py`). Longer ones, and a lone one that is one run, read a view of the row's run, or one gather of
its slots if it has several runs, from the oldest token that a query of the piece sees. A GPU uses MLX's fused attention
for them. A CPU computes stretches of queries, and skips tokens that come after all of them.

Softmax is computed in powers of two (`softmax.py`); for a single row's few scores, by MLX. Below float32, a CPU
computes every row by MLX's own attention instead, so that a row is rounded in the same way alone, in a batch and in
mlx-lm.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx

from cortexmlx.attention.paged import AttentionParams, PagedKV
from cortexmlx.attention.quantized import key_products, split_quantized, weighted_sum
from cortexmlx.attention.reference_step import PieceBatches, ReferenceStep, RowIndex
from cortexmlx.attention.softmax import Softmax, attend_like_mlx_lm, normalize
from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.arena import QUANTIZED_PARTS, Quantization, Slab
from cortexmlx.kv.step import PrefillPiece

MAX_SIMPLE_SCORES = 8192
"""Up to this many scores of a row, the number of operations costs more than what they compute."""

QUERIES_PER_CHUNK = 64
"""Queries of a prefill piece that a CPU computes together. Fewer would make small matrix products, more would compute
more scores of later tokens.
"""


def attend(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Compute `paged_attention` by the reference path."""
    if not kv.step.pieces:
        return attend_rows(queries, kv, params)
    parts = [attend_rows(queries, kv, params)] if len(kv.step.lengths) else []
    parts += attend_pieces(queries, kv, params)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def attend_rows(queries: mx.array, kv: PagedKV, params: AttentionParams) -> mx.array:
    """Return the attention of the step's single-token queries, `[rows, query_heads, 1, value_dim]`. `queries` are
    those of the whole step.
    """
    lengths, coarse = kv.step.lengths, rounds_coarsely(queries, kv)
    rows = len(lengths)
    run = kv.step.runs[0] if rows == 1 and kv.quantization is None else None
    plain = not coarse and params.sinks is None and params.softcap is None and params.slopes is None
    if run is not None and plain and queries.shape[1] * (int(lengths[0]) + kv.tail_tokens) <= MAX_SIMPLE_SCORES:
        return _attend_run(queries[:1], kv, run, params.scale, None)
    softmax = Softmax(params, queries.dtype, ReferenceStep.from_handle(kv).ones)
    if run is not None and not (coarse and not softmax.beyond_mlx_lm):
        return _attend_run(queries[:1], kv, run, params.scale, softmax)
    return _attend_batch(queries[:rows], kv, softmax, _row_index(kv), coarse)


def _attend_batch(queries: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex, coarse: bool) -> mx.array:
    """Attend with all rows of an index at once: `queries` `[rows, query_heads, queries, dim]` give `[rows,
    query_heads, queries, value_dim]`.
    """
    if coarse and not softmax.beyond_mlx_lm:
        return _attend_copied(queries, kv, softmax, index)
    if kv.quantization is not None and multiplies_quantized():
        return _attend_quantized(queries, kv, kv.quantization, softmax, index)
    return _attend_blocks(queries, kv, softmax, index)


def _row_index(kv: PagedKV) -> RowIndex:
    """Return the index arrays of the step's single-token queries."""
    return ReferenceStep.from_handle(kv).row_index(*_slab_sizes(kv))


def _slab_sizes(kv: PagedKV) -> tuple[int, int, int]:
    """Return a layer's KV heads, the blocks of its slab, and the tokens of a block."""
    heads, slots, _ = kv.arena.slab(kv.layer)[0].shape
    return heads, slots // kv.arena.block_size, kv.arena.block_size


def attend_pieces(queries: mx.array, kv: PagedKV, params: AttentionParams, *, apart: bool = False) -> list[mx.array]:
    """Return the attention of the step's prefill pieces, arrays `[tokens, query_heads, 1, value_dim]` in order.
    `queries` are those of the whole step. Every backend uses it.

    Short pieces are computed together; but not if they are `apart`, so that none depends on its neighbours.
    """
    softmax = Softmax(params, queries.dtype, ReferenceStep.from_handle(kv).ones)
    if apart or kv.expand is not None:
        return [_attend_piece(queries[p.begin : p.end], kv, p, softmax) for p in kv.step.pieces]
    cut, coarse = kv.derived.get(PieceBatches, kv.step), rounds_coarsely(queries, kv)
    found, without_tail = [], replace(kv, tail=None, tail_tokens=0)
    for batch in cut.batches:
        attended = _attend_batch(
            batch.queries(queries), without_tail, softmax, batch.row_index(*_slab_sizes(kv)), coarse
        )
        _, heads, _, dim = attended.shape
        found.append(attended.swapaxes(1, 2).reshape(-1, heads, 1, dim))
    found += [_attend_piece(queries[p.begin : p.end], kv, p, softmax) for p in cut.alone]
    return found if cut.order is None else [mx.concatenate(found)[cut.order]]


def rounds_coarsely(queries: mx.array, kv: PagedKV) -> bool:
    """Return whether this is MLX's CPU build below float32, where every product is rounded to 8 or 11 bits.

    Two ways of the same mathematics then differ by as much as the model's own rounding errors, which are not small. So
    there is one way: MLX's attention, or with a soft cap that of mlx-lm's models. Its result for a query does not
    depend on what is computed beside it.
    """
    return mx.default_device() == mx.cpu and not queries.dtype == kv.dtype == mx.float32


def attend_gathered(queries: mx.array, kv: PagedKV, softmax: Softmax) -> mx.array:
    """Attend with single-token queries by MLX's attention over a padded copy of their rows' keys and values. Does not
    serve softmaxes that are `beyond_mlx_lm`.
    """
    return _attend_copied(queries, kv, softmax, _row_index(kv))


def _attend_copied(queries: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex) -> mx.array:
    """Attend with the rows of an index by MLX's attention over a padded copy of their keys and values."""
    rows, heads, _ = index.block.shape
    seen = tuple(a[index.block].reshape(rows, heads, -1, a.shape[-1]) for a in kv.arena.slab_as_blocks(kv.layer))
    if kv.tail is not None:
        newest = (t[:, :, : kv.tail_tokens] for t in kv.tail)
        seen = tuple(mx.concatenate(list(both), axis=2) for both in zip(seen, newest, strict=True))
    seen = _dequantize_slab(kv, seen)
    keys, values, shared = _split_kv(seen, kv.value_in_key)
    return attend_like_mlx_lm(queries, keys, values, softmax, index.visible_mask(kv), shared)


def _split_kv(seen: Slab, value_in_key: int | None) -> tuple[mx.array, mx.array, mx.array | None]:
    """Return keys, values and, if the values are part of the keys, the rest of the keys."""
    if value_in_key is None:
        return seen[0], seen[1], None
    values = seen[0][..., :value_in_key]
    return values, values, seen[0][..., value_in_key:]


def _attend_blocks(queries: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex) -> mx.array:
    """Attend with the rows of an index: blocks by `gather_mm`, the tail by an ordinary product, and one softmax over
    both.
    """
    rows, query_heads, count, dim = queries.shape
    heads, block_size = index.block.shape[1], kv.arena.block_size
    blocks, each = index.blocks, query_heads // heads * count
    span = blocks * block_size

    q = softmax.scale_queries(queries).reshape(rows, heads, each, dim)
    scores = _block_products(q.reshape(-1, each, dim), kv, index.row_head, index.block, values=False)
    scores = scores.swapaxes(2, 3).reshape(rows, heads, each, span)
    if kv.tail is not None:
        tail = _dequantize_slab(kv, tuple(t[:, :, : kv.tail_tokens] for t in kv.tail))
        tail_keys, tail_values = tail[0], tail[-1]
        scores = mx.concatenate([scores, q @ tail_keys.swapaxes(-1, -2)], axis=-1)
    weights, total = _softmax_weights(scores, kv, softmax, index, count)
    spread = weights[..., :span].reshape(rows, heads, each, blocks, block_size).swapaxes(2, 3)
    out = _block_products(spread.reshape(-1, each, block_size), kv, index.each, index.block, values=True)
    out = out.astype(mx.float32).sum(axis=2)
    if kv.tail is not None:
        out = out + weights[..., span:] @ tail_values
    return normalize(_trim_values(out, kv), total).astype(queries.dtype).reshape(rows, query_heads, count, -1)


def _softmax_weights(
    products: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex, count: int
) -> tuple[mx.array, mx.array | None]:
    """Return the softmax weights and their sum for products `[rows, heads, group * count, columns]` of `count` queries
    of each row with the keys that an index names.
    """
    rows, heads, each, columns = products.shape
    of_heads = (heads, each // count, 1, 1)
    scores = softmax.scores_from_products(products).reshape(rows, *of_heads[:2], count, columns)
    scores = softmax.add_alibi(scores, of_heads, lambda: index.token_distances(kv)[:, None])
    scores = mx.where(index.visible_mask(kv)[:, None], scores, mx.array(-mx.inf, scores.dtype))
    weights, total = softmax.weights(scores, of_heads)
    return weights.reshape(products.shape), None if total is None else total.reshape(rows, heads, each, 1)


def multiplies_quantized() -> bool:
    """Return whether quantized keys and values are multiplied in float32, as in `quantized.py`: on a CPU."""
    return bool(mx.default_device() == mx.cpu)


def _attend_quantized(
    queries: mx.array, kv: PagedKV, form: Quantization, softmax: Softmax, index: RowIndex
) -> mx.array:
    """Attend with the rows of an index to quantized keys and values on a CPU."""
    slab = kv.arena.slab_as_blocks(kv.layer)
    tail = None if kv.tail is None else [t[:, :, : kv.tail_tokens] for t in kv.tail]
    heads, (rows, query_heads, count, dim) = index.block.shape[1], queries.shape
    q = softmax.scale_queries(queries).reshape(rows, heads, -1, dim).astype(mx.float32)
    scores = key_products(q, split_quantized(slab, tail, index.block, form, values=False))
    weights, total = _softmax_weights(scores, kv, softmax, index, count)
    out = weighted_sum(weights.astype(mx.float32), split_quantized(slab, tail, index.block, form, values=True))
    return normalize(_trim_values(out, kv), total).astype(queries.dtype).reshape(rows, query_heads, count, -1)


def _quantized_products(
    left: mx.array, kv: PagedKV, which_left: mx.array, which_block: mx.array, *, values: bool
) -> mx.array:
    """Multiply `left[which_left]` by the quantized blocks that `which_block` names (block b of head h is h * all + b):
    by their keys transposed, or by their `values`.
    """
    form = kv.quantization
    assert form is not None
    slab = kv.arena.slab_as_blocks(kv.layer)
    codes, scales, biases = slab[-QUANTIZED_PARTS:] if values else slab[:QUANTIZED_PARTS]
    return mx.gather_qmm(
        left,
        codes,
        scales,
        biases,
        lhs_indices=which_left,
        rhs_indices=which_block,
        transpose=not values,
        group_size=form.group,
        bits=form.bits,
    )


def _dequantize_slab(kv: PagedKV, arrays: Slab) -> Slab:
    """Return keys and values of a slab, a view or a tail, dequantized if the layer is quantized."""
    return arrays if kv.quantization is None else kv.quantization.dequantize(arrays)


def _block_products(
    left: mx.array, kv: PagedKV, which_left: mx.array, which_block: mx.array, *, values: bool
) -> mx.array:
    """Multiply `left[which_left]` by the blocks that `which_block` names: by their keys transposed, or by their
    `values`.

    The blocks are not copied, except that MLX's CPU build can do that with plain blocks in float32 only. With two
    dtypes MLX would convert the whole slab.
    """
    if kv.quantization is not None:
        return _quantized_products(left, kv, which_left, which_block, values=values)
    blocks = kv.arena.slab_as_blocks(kv.layer)[-1 if values else 0]
    blocks = blocks if values else blocks.swapaxes(-1, -2)
    if left.dtype == blocks.dtype and (left.dtype == mx.float32 or mx.default_device() != mx.cpu):
        return mx.gather_mm(left, blocks, which_left, which_block)
    return left[which_left] @ blocks[which_block]


def _attend_run(queries: mx.array, kv: PagedKV, run: KVHandle, scale: float, softmax: Softmax | None) -> mx.array:
    """Attend with the query of a single row whose blocks are consecutive, over a view of the arena. `softmax` None: by
    `mx.softmax`, for scores that are only scaled (no soft cap, slopes or sinks).
    """
    length, tail = int(kv.step.lengths[0]), kv.tail_tokens
    first = 0 if kv.step.attention_window.tokens is None else kv.step.attention_window.oldest_visible(length + tail - 1)
    begin = min(first, length)
    view = kv.arena.view(kv.layer, run, length)
    if begin:
        view = tuple([a[:, begin:] for a in view])
    keys, values = view[0], view[-1]
    heads, span = keys.shape[0], length - begin
    _, query_heads, _, dim = queries.shape
    q = (queries * scale if softmax is None else softmax.scale_queries(queries)).reshape(
        heads, query_heads // heads, dim
    )
    scores = q @ keys.swapaxes(-1, -2)
    if kv.tail is not None:
        tail_keys, tail_values = kv.tail[0][0, :, first - begin : tail], kv.tail[-1][0, :, first - begin : tail]
        scores = mx.concatenate([scores, q @ tail_keys.swapaxes(-1, -2)], axis=-1)
    total = None
    if softmax is None:
        weights = mx.softmax(scores, axis=-1, precise=True)
    else:
        shape, newest = (heads, query_heads // heads, 1), length + tail - 1
        distance = partial(ReferenceStep.token_distances, newest, newest + 1, first)
        weights, total = softmax.weights(
            softmax.add_alibi(softmax.scores_from_products(scores), shape, distance), shape
        )
    if kv.tail is None:
        out = weights @ values
    else:
        out = mx.addmm(weights[..., span:] @ tail_values, weights[..., :span], values)
    out = _trim_values(out, kv) if keys is values else out
    return (out if total is None else out / total).astype(queries.dtype).reshape(1, query_heads, 1, -1)


def _trim_values(sums: mx.array, kv: PagedKV) -> mx.array:
    """Return the weighted sums cut to the value's size. If values are part of their keys, the sums are of whole keys,
    because cutting the keys would copy them.
    """
    width = kv.value_in_key
    return sums if width is None or kv.expand is not None else sums[..., :width]


def _attend_piece(queries: mx.array, kv: PagedKV, piece: PrefillPiece, softmax: Softmax) -> mx.array:
    """Attend with a prefill piece: consecutive queries of one row, causally and within the window."""
    step = ReferenceStep.from_handle(kv)
    base = step.oldest_token(piece)
    seen = _piece_kv(kv, piece, base)
    gpu = mx.default_device() != mx.cpu
    if (softmax.softcap is None and softmax.slopes is None and gpu) or (
        rounds_coarsely(queries, kv) and not softmax.beyond_mlx_lm
    ):
        keys, values, rest = _split_kv(seen, kv.value_in_key)
        if kv.expand is not None:
            keys, values = kv.expand(mx.contiguous(values))
        shared = None if rest is None else rest[None]
        mask = step.mask(piece)
        return attend_like_mlx_lm(queries.swapaxes(0, 2), keys[None], values[None], softmax, mask, shared).swapaxes(
            0, 2
        )
    keys, values = seen[0], seen[-1]
    if kv.expand is not None:
        _, latents, rest = _split_kv(seen, kv.value_in_key)
        assert rest is not None
        keys, values = kv.expand(mx.contiguous(latents))
        keys = mx.concatenate([keys, mx.broadcast_to(rest, (*keys.shape[:-1], rest.shape[-1]))], axis=-1)
    heads, (count, query_heads, _, dim) = keys.shape[0], queries.shape
    group = query_heads // heads
    q = softmax.scale_queries(queries).reshape(count, heads, group, dim).transpose(1, 2, 0, 3)
    parts = []
    for begin in range(0, count, QUERIES_PER_CHUNK):
        end = min(begin + QUERIES_PER_CHUNK, count)
        first, last = piece.first + begin, piece.first + end
        oldest = kv.step.attention_window.oldest_visible(first)
        stretch = q[:, :, begin:end].reshape(heads, -1, dim)
        scores = stretch @ keys[:, oldest - base : last - base].swapaxes(-1, -2)
        scores = softmax.scores_from_products(scores).reshape(heads, group, end - begin, -1)
        scores = softmax.add_alibi(scores, (heads, group, 1, 1), partial(step.token_distances, first, last, oldest))
        scores = scores + step.additive_mask(first, last, oldest, scores.dtype)
        weights, total = softmax.weights(scores, (heads, group, 1, 1))
        out = weights.reshape(heads, -1, last - oldest) @ values[:, oldest - base : last - base]
        parts.append(normalize(_trim_values(out, kv).reshape(heads, group, end - begin, -1), total))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return out.astype(queries.dtype).transpose(2, 0, 1, 3).reshape(count, query_heads, 1, -1)


def _piece_kv(kv: PagedKV, piece: PrefillPiece, oldest: int) -> Slab:
    """Return the keys and values that a piece sees, from token `oldest` on."""
    if piece.run is not None:
        view = kv.arena.view(kv.layer, piece.run, piece.tokens)
        return _dequantize_slab(kv, tuple(a[:, oldest:] for a in view) if oldest else view)
    slots = ReferenceStep.from_handle(kv).slots(piece)
    return _dequantize_slab(kv, tuple(mx.take(a, slots, axis=1) for a in kv.arena.slab(kv.layer)))
