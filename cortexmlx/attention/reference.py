"""The reference backend: paged attention in plain MLX operations. It is the CPU's path and the GPU's fallback.

Single-token queries use `mx.gather_mm`, which multiplies blocks where they are. The slab is reshaped (at no cost) to
matrices `[kv_heads * blocks, block_size, dim]`, and the block table selects them. Whole blocks are read, so tokens
after a row's last one are excluded by selection. A block is filled with zeros when its first token is written, because
`0 * NaN` is NaN. Quantized blocks are multiplied in place, too, by `mx.gather_qmm`, or on a CPU by `quantized.py`. What
a longer piece sees is dequantized.

Short prefill pieces, of rows that verify drafts for example, are rows with several queries, all in one batch
(`PieceBatches`). Longer ones, and a lone one that is one run, read a view of the row's run, or one gather of
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
    """Return attention `[rows, query_heads, 1, value_dim]` of single-token queries. `queries` are the whole step's."""
    lengths, coarse = kv.step.lengths, rounds_coarsely(queries, kv)
    rows = len(lengths)
    run = kv.step.runs[0] if rows == 1 and kv.quantization is None else None
    only_scaled = not coarse and params.sinks is None and params.softcap is None and params.slopes is None
    if run is not None and only_scaled and queries.shape[1] * (int(lengths[0]) + kv.tail_tokens) <= MAX_SIMPLE_SCORES:
        return _attend_run(queries[:1], kv, run, params.scale, None)
    softmax = Softmax(params, queries.dtype, ReferenceStep.from_handle(kv).ones)
    if run is not None and not (coarse and not softmax.beyond_mlx_lm):
        return _attend_run(queries[:1], kv, run, params.scale, softmax)
    return _attend_batch(queries[:rows], kv, softmax, _row_index(kv), coarse)


def _attend_batch(queries: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex, coarse: bool) -> mx.array:
    """Attend with all rows of an index: `queries` `[rows, query_heads, queries, dim]`, result `[..., value_dim]`."""
    if coarse and not softmax.beyond_mlx_lm:
        return _attend_copied(queries, kv, softmax, index)
    if kv.quantization is not None and multiplies_quantized():
        return _attend_quantized(queries, kv, kv.quantization, softmax, index)
    return _attend_blocks(queries, kv, softmax, index)


def _row_index(kv: PagedKV) -> RowIndex:
    """Return the index arrays of the step's single-token queries."""
    return ReferenceStep.from_handle(kv).row_index(*_slab_sizes(kv))


def _slab_sizes(kv: PagedKV) -> tuple[int, int, int]:
    """Return how many KV heads a layer has, how many blocks its slab has, and how many tokens a block."""
    heads, slots, _ = kv.arena.slab(kv.layer)[0].shape
    return heads, slots // kv.arena.block_size, kv.arena.block_size


def attend_pieces(
    queries: mx.array, kv: PagedKV, params: AttentionParams, *, one_by_one: bool = False
) -> list[mx.array]:
    """Return the attention of the step's prefill pieces, arrays `[tokens, query_heads, 1, value_dim]` in order.
    `queries` are those of the whole step. Every backend uses this function.

    Short pieces are computed together; but not with `one_by_one`, so that none depends on its neighbours.
    """
    softmax = Softmax(params, queries.dtype, ReferenceStep.from_handle(kv).ones)
    if one_by_one or kv.expand is not None:
        return [_attend_piece(queries[p.begin : p.end], kv, p, softmax) for p in kv.step.pieces]
    piece_batches, coarse = kv.derived.get(PieceBatches, kv.step), rounds_coarsely(queries, kv)
    outputs, without_tail = [], replace(kv, tail=None, tail_tokens=0)
    for batch in piece_batches.batches:
        output = _attend_batch(batch.select(queries), without_tail, softmax, batch.row_index(*_slab_sizes(kv)), coarse)
        _, heads, _, dim = output.shape
        outputs.append(output.swapaxes(1, 2).reshape(-1, heads, 1, dim))
    outputs += [_attend_piece(queries[p.begin : p.end], kv, p, softmax) for p in piece_batches.lone_pieces]
    return outputs if piece_batches.order is None else [mx.concatenate(outputs)[piece_batches.order]]


def attend_piece(queries: mx.array, kv: PagedKV, params: AttentionParams, piece: PrefillPiece) -> mx.array:
    """Return the attention of one of a step's prefill pieces: see `attend_pieces`."""
    softmax = Softmax(params, queries.dtype, ReferenceStep.from_handle(kv).ones)
    return _attend_piece(queries[piece.begin : piece.end], kv, piece, softmax)


def rounds_coarsely(queries: mx.array, kv: PagedKV) -> bool:
    """Return whether MLX computes this on a CPU below float32, where it rounds every product to 8 or 11 bits.

    Two ways of the same mathematics then differ by as much as the model's own rounding errors, which are not small. So
    there is one way: MLX's attention, or with a soft cap that of mlx-lm's models. Its result for a query does not
    depend on what is computed beside it.
    """
    return mx.default_device() == mx.cpu and not queries.dtype == kv.dtype == mx.float32


def attend_gathered(queries: mx.array, kv: PagedKV, softmax: Softmax) -> mx.array:
    """Attend with single-token queries by MLX over padded copies of their rows; not for softmaxes `beyond_mlx_lm`."""
    return _attend_copied(queries, kv, softmax, _row_index(kv))


def _attend_copied(queries: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex) -> mx.array:
    """Attend with the rows of an index by MLX's attention over a padded copy of their keys and values."""
    rows, heads, _ = index.block.shape
    row_kv = tuple(a[index.block].reshape(rows, heads, -1, a.shape[-1]) for a in kv.arena.slab_as_blocks(kv.layer))
    if kv.tail is not None:
        tail_arrays = (t[:, :, : kv.tail_tokens] for t in kv.tail)
        row_kv = tuple(mx.concatenate(list(pair), axis=2) for pair in zip(row_kv, tail_arrays, strict=True))
    row_kv = _dequantize_slab(kv, row_kv)
    keys, values, shared = _split_kv(row_kv, kv.value_in_key)
    return attend_like_mlx_lm(queries, keys, values, softmax, index.visible_mask(kv), shared)


def _split_kv(arrays: Slab, value_in_key: int | None) -> tuple[mx.array, mx.array, mx.array | None]:
    """Return keys, values and, if the values are part of the keys, the rest of the keys."""
    if value_in_key is None:
        return arrays[0], arrays[1], None
    values = arrays[0][..., :value_in_key]
    return values, values, arrays[0][..., value_in_key:]


def _attend_blocks(queries: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex) -> mx.array:
    """Attend with an index's rows: blocks by `gather_mm`, the tail by a plain product, and one softmax over both."""
    rows, query_heads, count, dim = queries.shape
    heads, block_size = index.block.shape[1], kv.arena.block_size
    blocks, queries_per_head = index.blocks, query_heads // heads * count
    span = blocks * block_size

    q = softmax.scale_queries(queries).reshape(rows, heads, queries_per_head, dim)
    scores = _block_products(q.reshape(-1, queries_per_head, dim), kv, index.row_head, index.block, values=False)
    scores = scores.swapaxes(2, 3).reshape(rows, heads, queries_per_head, span)
    if kv.tail is not None:
        tail = _dequantize_slab(kv, tuple(t[:, :, : kv.tail_tokens] for t in kv.tail))
        tail_keys, tail_values = tail[0], tail[-1]
        scores = mx.concatenate([scores, q @ tail_keys.swapaxes(-1, -2)], axis=-1)
    weights, total = _softmax_weights(scores, kv, softmax, index, count)
    spread = weights[..., :span].reshape(rows, heads, queries_per_head, blocks, block_size).swapaxes(2, 3)
    out = _block_products(
        spread.reshape(-1, queries_per_head, block_size), kv, index.weights_index, index.block, values=True
    )
    out = out.astype(mx.float32).sum(axis=2)
    if kv.tail is not None:
        out = out + weights[..., span:] @ tail_values
    return normalize(_trim_values(out, kv), total).astype(queries.dtype).reshape(rows, query_heads, count, -1)


def _softmax_weights(
    products: mx.array, kv: PagedKV, softmax: Softmax, index: RowIndex, count: int
) -> tuple[mx.array, mx.array | None]:
    """Return softmax weights and sum of `products` `[rows, heads, group * count, columns]`, `count` queries per row."""
    rows, heads, queries_per_head, columns = products.shape
    of_heads = (heads, queries_per_head // count, 1, 1)
    scores = softmax.scores_from_products(products).reshape(rows, *of_heads[:2], count, columns)
    scores = softmax.add_alibi(scores, of_heads, lambda: index.token_distances(kv)[:, None])
    scores = mx.where(index.visible_mask(kv)[:, None], scores, mx.array(-mx.inf, scores.dtype))
    weights, total = softmax.weights(scores, of_heads)
    return weights.reshape(products.shape), None if total is None else total.reshape(rows, heads, queries_per_head, 1)


def multiplies_quantized() -> bool:
    """Return whether quantized keys and values are multiplied in float32, as in `quantized.py`: on a CPU."""
    return bool(mx.default_device() == mx.cpu)


def _attend_quantized(
    queries: mx.array, kv: PagedKV, form: Quantization, softmax: Softmax, index: RowIndex
) -> mx.array:
    """Return the attention of an index's rows to quantized keys and values, on a CPU."""
    slab = kv.arena.slab_as_blocks(kv.layer)
    tail = None if kv.tail is None else [t[:, :, : kv.tail_tokens] for t in kv.tail]
    heads, (rows, query_heads, count, dim) = index.block.shape[1], queries.shape
    q = softmax.scale_queries(queries).reshape(rows, heads, -1, dim).astype(mx.float32)
    scores = key_products(q, split_quantized(slab, tail, index.block, form, values=False))
    weights, total = _softmax_weights(scores, kv, softmax, index, count)
    out = weighted_sum(weights.astype(mx.float32), split_quantized(slab, tail, index.block, form, values=True))
    return normalize(_trim_values(out, kv), total).astype(queries.dtype).reshape(rows, query_heads, count, -1)


def _quantized_matmuls(
    lhs: mx.array, kv: PagedKV, lhs_indices: mx.array, block_indices: mx.array, *, values: bool
) -> mx.array:
    """Multiply `lhs[lhs_indices]` by the quantized blocks that `block_indices` names (h * blocks + b: block b of head
    h): by their keys transposed, or by their `values`.
    """
    form = kv.quantization
    assert form is not None
    slab = kv.arena.slab_as_blocks(kv.layer)
    codes, scales, biases = slab[-QUANTIZED_PARTS:] if values else slab[:QUANTIZED_PARTS]
    return mx.gather_qmm(
        lhs,
        codes,
        scales,
        biases,
        lhs_indices=lhs_indices,
        rhs_indices=block_indices,
        transpose=not values,
        group_size=form.group,
        bits=form.bits,
    )


def _dequantize_slab(kv: PagedKV, arrays: Slab) -> Slab:
    """Return keys and values of a slab, a view or a tail, dequantized if the layer is quantized."""
    return arrays if kv.quantization is None else kv.quantization.dequantize(arrays)


def _block_products(
    lhs: mx.array, kv: PagedKV, lhs_indices: mx.array, block_indices: mx.array, *, values: bool
) -> mx.array:
    """Multiply `lhs[lhs_indices]` by the blocks that `block_indices` names: by their keys transposed, or by their
    `values`.

    The blocks are not copied, except that MLX's CPU build can do that with plain blocks in float32 only. With two
    dtypes MLX would convert the whole slab.
    """
    if kv.quantization is not None:
        return _quantized_matmuls(lhs, kv, lhs_indices, block_indices, values=values)
    blocks = kv.arena.slab_as_blocks(kv.layer)[-1 if values else 0]
    blocks = blocks if values else blocks.swapaxes(-1, -2)
    if lhs.dtype == blocks.dtype and (lhs.dtype == mx.float32 or mx.default_device() != mx.cpu):
        return mx.gather_mm(lhs, blocks, lhs_indices, block_indices)
    return lhs[lhs_indices] @ blocks[block_indices]


def _attend_run(queries: mx.array, kv: PagedKV, run: KVHandle, scale: float, softmax: Softmax | None) -> mx.array:
    """Attend with the query of a single row whose blocks are consecutive, over a view of the arena. With `softmax`
    None, use `mx.softmax`: for scores that are only scaled (no soft cap, slopes or sinks).
    """
    length, tail_tokens = int(kv.step.lengths[0]), kv.tail_tokens
    first = (
        0
        if kv.step.attention_window.tokens is None
        else kv.step.attention_window.oldest_visible(length + tail_tokens - 1)
    )
    arena_start = min(first, length)
    view = kv.arena.view(kv.layer, run, length)
    if arena_start:
        view = tuple([a[:, arena_start:] for a in view])
    keys, values = view[0], view[-1]
    heads, span = keys.shape[0], length - arena_start
    _, query_heads, _, dim = queries.shape
    q = (queries * scale if softmax is None else softmax.scale_queries(queries)).reshape(
        heads, query_heads // heads, dim
    )
    scores = q @ keys.swapaxes(-1, -2)
    if kv.tail is not None:
        tail_keys, tail_values = (
            kv.tail[0][0, :, first - arena_start : tail_tokens],
            kv.tail[-1][0, :, first - arena_start : tail_tokens],
        )
        scores = mx.concatenate([scores, q @ tail_keys.swapaxes(-1, -2)], axis=-1)
    total = None
    if softmax is None:
        weights = mx.softmax(scores, axis=-1, precise=True)
    else:
        shape, newest_token = (heads, query_heads // heads, 1), length + tail_tokens - 1
        distance = partial(ReferenceStep.token_distances, newest_token, newest_token + 1, first)
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
    """Cut weighted sums to the size of a value. Values in keys are summed as whole keys, since cutting keys copies."""
    width = kv.value_in_key
    return sums if width is None or kv.expand is not None else sums[..., :width]


def _attend_piece(queries: mx.array, kv: PagedKV, piece: PrefillPiece, softmax: Softmax) -> mx.array:
    """Attend with a prefill piece: consecutive queries of one row, within the window, causally or bidirectionally."""
    step = ReferenceStep.from_handle(kv)
    base = step.oldest_token(piece)
    piece_kv = _piece_kv(kv, piece, base)
    gpu = mx.default_device() != mx.cpu
    if (softmax.softcap is None and softmax.slopes is None and gpu) or (
        rounds_coarsely(queries, kv) and not softmax.beyond_mlx_lm
    ):
        keys, values, rest = _split_kv(piece_kv, kv.value_in_key)
        if kv.expand is not None:
            keys, values = kv.expand(mx.contiguous(values))
        shared = None if rest is None else rest[None]
        mask = step.mask(piece)
        return attend_like_mlx_lm(queries.swapaxes(0, 2), keys[None], values[None], softmax, mask, shared).swapaxes(
            0, 2
        )
    keys, values = piece_kv[0], piece_kv[-1]
    if kv.expand is not None:
        _, latents, rest = _split_kv(piece_kv, kv.value_in_key)
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
        seen = piece.tokens if piece.bidirectional else last
        oldest_token = kv.step.attention_window.oldest_visible(first)
        chunk_queries = q[:, :, begin:end].reshape(heads, -1, dim)
        scores = chunk_queries @ keys[:, oldest_token - base : seen - base].swapaxes(-1, -2)
        scores = softmax.scores_from_products(scores).reshape(heads, group, end - begin, -1)
        scores = softmax.add_alibi(
            scores, (heads, group, 1, 1), partial(step.token_distances, first, last, oldest_token)
        )
        scores = scores + step.additive_mask(
            first, last, oldest_token, scores.dtype, seen if piece.bidirectional else None
        )
        weights, total = softmax.weights(scores, (heads, group, 1, 1))
        out = weights.reshape(heads, -1, seen - oldest_token) @ values[:, oldest_token - base : seen - base]
        parts.append(normalize(_trim_values(out, kv).reshape(heads, group, end - begin, -1), total))
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return out.astype(queries.dtype).transpose(2, 0, 1, 3).reshape(count, query_heads, 1, -1)


def _piece_kv(kv: PagedKV, piece: PrefillPiece, oldest_token: int) -> Slab:
    """Return the keys and values that a piece sees, from token `oldest_token` on."""
    if piece.run is not None:
        view = kv.arena.view(kv.layer, piece.run, piece.tokens)
        return _dequantize_slab(kv, tuple(a[:, oldest_token:] for a in view) if oldest_token else view)
    slots = ReferenceStep.from_handle(kv).slots(piece)
    return _dequantize_slab(kv, tuple(mx.take(a, slots, axis=1) for a in kv.arena.slab(kv.layer)))
