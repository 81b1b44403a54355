"""Attention as mlx-lm's models compute it, with its roundings."""

from __future__ import annotations

import mlx.core as mx

from cortexmlx.attention.softmax import Softmax
from cortexmlx.kv.arena import Slab


def as_mlx(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    softmax: Softmax,
    mask: mx.array | str,
    shared: mx.array | None = None,
) -> mx.array:
    """Return attention as mlx-lm's models compute it, with their roundings.

    Queries are `[rows, query_heads, queries, dim]`, keys and values `[rows, kv_heads, tokens, dim]`. `mask` is a bool
    for each query and token, or "causal". `shared` `[rows, heads, tokens, rest]` is the rotary part of latent
    attention's keys, whose scores those models add; it has as many heads as are stored.
    """
    if shared is not None and softmax.softcap is None:
        (rows, heads, count, _), dim = queries.shape, keys.shape[-1]
        grouped = (queries[..., dim:] * softmax.scale).reshape(rows, shared.shape[1], -1, count, shared.shape[-1])
        rest = (grouped @ shared[:, :, None].swapaxes(-1, -2)).reshape(rows, heads, count, -1)
        visible = _visible(mask, *rest.shape[-2:])
        rest = mx.where(visible, rest, mx.array(mx.finfo(rest.dtype).min, rest.dtype))
        return mx.fast.scaled_dot_product_attention(
            queries[..., :dim], keys, values, scale=softmax.scale, mask=rest, sinks=softmax.sinks
        )
    if shared is not None:
        keys = mx.concatenate([keys, shared], axis=-1)
    if softmax.softcap is None:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=softmax.scale, mask=mask, sinks=softmax.sinks
        )
    rows, heads, count, dim = queries.shape
    grouped = (queries * softmax.scale).reshape(rows, keys.shape[1], -1, count, dim)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2)
    scores = mx.tanh(scores / softmax.softcap) * softmax.softcap
    mask = _visible(mask, count, keys.shape[2])
    mask = mask[:, :, None] if mask.ndim == 4 else mask
    scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    out = mx.softmax(scores, precise=True, axis=-1) @ values[:, :, None]
    return out.reshape(rows, heads, count, -1)


def _visible(mask: mx.array | str, count: int, tokens: int) -> mx.array:
    """Return the mask as bools."""
    return mx.arange(tokens) <= mx.arange(tokens - count, tokens)[:, None] if isinstance(mask, str) else mask


def keys_and_values(seen: Slab, value_in_key: int | None) -> tuple[mx.array, mx.array, mx.array | None]:
    """Return keys, values and, if the values are part of the keys, the rest of the keys."""
    if value_in_key is None:
        return seen[0], seen[1], None
    values = seen[0][..., :value_in_key]
    return values, values, seen[0][..., value_in_key:]
