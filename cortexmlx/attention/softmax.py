"""The softmax of attention for the reference backend, in powers of two: `2 ** (s * log2(e))` is `e ** s`.

On MLX's Linux CPU build, `power` takes a third of the time of `exp`, which takes most of the time of attention at a few
hundred tokens. Elsewhere the two cost the same. The factor log2(e) is part of the scale of the queries. The division by
the weights' sum is applied to the output, which is smaller than the weights.

Below float32 both would be rounded to a few bits. There the queries get the plain scale (often a power of two, which
rounds nothing), everything from the scores to the divided weights is float32, and the weights are rounded once.
`attend_like_mlx_lm` is the other way: MLX's own attention, or that of mlx-lm's models, with their roundings.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from cortexmlx.attention.paged import AttentionParams
from cortexmlx.cpu.powers_of_two import LOG2_E, exp2


class Softmax:
    """The softmax of one layer's attention, with sinks, softcap and ALiBi slopes, for queries of a `dtype`.

    `ones` keeps columns of ones, by their length, for a whole step.
    """

    def __init__(self, params: AttentionParams, dtype: mx.Dtype, ones: dict[int, mx.array]) -> None:
        self.scale, self.sinks, self.softcap, self.slopes = params.scale, params.sinks, params.softcap, params.slopes
        self._dtype = dtype
        self._coarse = dtype != mx.float32
        self._columns = ones

    @property
    def beyond_mlx_lm(self) -> bool:
        """Whether no mlx-lm model has this combination of options: sinks with a softcap, or ALiBi slopes."""
        return (self.sinks is not None and self.softcap is not None) or self.slopes is not None

    def scale_queries(self, queries: mx.array) -> mx.array:
        """Return the queries, scaled for the product with keys."""
        plain_scale = self._coarse or self.softcap is not None
        return queries * (self.scale if plain_scale else self.scale * LOG2_E)

    def scores_from_products(self, products: mx.array) -> mx.array:
        """Return scores (base-2 logits with softcap) of scaled queries' products with keys. The caller masks them."""
        if self._coarse:
            products = products.astype(mx.float32)
        if self.softcap is not None:
            return (self.softcap * LOG2_E) * mx.tanh(products / self.softcap)
        return products * LOG2_E if self._coarse else products

    def add_alibi(
        self, scores: mx.array, heads_and_group: tuple[int, ...], distance: Callable[[], mx.array]
    ) -> mx.array:
        """Return the base-2 scores of `scores_from_products` with the ALiBi term: each head's slope times
        `distance()`, a token's position minus that of the query. `heads_and_group` is as in `weights`.
        """
        if self.slopes is None:
            return scores
        return scores + (self.slopes.astype(mx.float32) * LOG2_E).reshape(heads_and_group) * distance()

    def weights(self, scores: mx.array, heads_and_group: tuple[int, ...]) -> tuple[mx.array, mx.array | None]:
        """Return the weights of the values, and the sum to divide the weighted values by (None if the weights are
        normalized).

        `scores` `[..., columns]` are minus infinity where a query may not look. `heads_and_group` is the shape of the
        sinks `[query_heads]` within `[..., 1]`. The weights have the queries' dtype. Below float32 they are divided
        already, and there is nothing to divide by.
        """
        max_score = mx.max(scores, axis=-1, keepdims=True)
        sinks = None
        if self.sinks is not None:
            sinks = (self.sinks.astype(mx.float32) * LOG2_E).reshape(heads_and_group)
            max_score = mx.maximum(max_score, sinks)
        weights = exp2(scores - max_score)
        total = weights @ self._ones_column(scores.shape[-1])
        if sinks is not None:
            total = total + exp2(sinks - max_score)
        if not self._coarse:
            return weights, total
        return (weights / total).astype(self._dtype), None

    def _ones_column(self, count: int) -> mx.array:
        """Return `[count, 1]` ones: a product with them is a sum, computed by BLAS."""
        if count not in self._columns:
            self._columns[count] = mx.ones((count, 1))
        return self._columns[count]


def normalize(sums: mx.array, total: mx.array | None) -> mx.array:
    """Divide weighted sums of values by `total`, the sum of the weights; None: the weights are normalized already."""
    return sums if total is None else sums / total


def attend_like_mlx_lm(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    softmax: Softmax,
    mask: mx.array | str,
    shared: mx.array | None = None,
) -> mx.array:
    """Return attention computed as mlx-lm's models do it, with the same roundings.

    Queries are `[rows, query_heads, queries, dim]`, keys and values `[rows, kv_heads, tokens, dim]`. `mask` is a bool
    for each query and token, or "causal". `shared` `[rows, heads, tokens, rest]` is the rotary part of latent
    attention's keys, whose scores those models add; it has as many heads as are stored.
    """
    if shared is not None and softmax.softcap is None:
        (rows, heads, count, _), dim = queries.shape, keys.shape[-1]
        grouped_queries = (queries[..., dim:] * softmax.scale).reshape(
            rows, shared.shape[1], -1, count, shared.shape[-1]
        )
        rest = (grouped_queries @ shared[:, :, None].swapaxes(-1, -2)).reshape(rows, heads, count, -1)
        visible = _bool_mask(mask, *rest.shape[-2:])
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
    grouped_queries = (queries * softmax.scale).reshape(rows, keys.shape[1], -1, count, dim)
    scores = grouped_queries @ keys[:, :, None].swapaxes(-1, -2)
    scores = mx.tanh(scores / softmax.softcap) * softmax.softcap
    mask = _bool_mask(mask, count, keys.shape[2])
    mask = mask[:, :, None] if mask.ndim == 4 else mask
    scores = mx.where(mask, scores, mx.array(-mx.inf, scores.dtype))
    out = mx.softmax(scores, precise=True, axis=-1) @ values[:, :, None]
    return out.reshape(rows, heads, count, -1)


def _bool_mask(mask: mx.array | str, count: int, tokens: int) -> mx.array:
    """Return a mask as bools; "causal" becomes an array."""
    return mx.arange(tokens) <= mx.arange(tokens - count, tokens)[:, None] if isinstance(mask, str) else mask
