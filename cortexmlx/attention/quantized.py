"""Products of queries or weights with quantized keys and values, in float32 on a CPU.

A code is a whole number, which float32 holds exactly. So BLAS multiplies the codes as numbers, and scales and biases
are applied afterwards: `q . (s c + b) = s (q . c) + b (sum of q)`, and likewise for a weighted sum of values. If a
token has one group for a whole head, one product of `[queries, dim]` and `[dim, tokens]` is enough. Otherwise the codes
are multiplied by their scales first. MLX's own products with codes take three times as long there.

A byte holds one code of 8 bits, or two codes of 4 bits, the first one in its lower half. Then numbers at even and at
odd indices are multiplied separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from cortexmlx.kv.arena import QUANTIZED_PARTS, Quantization

CHUNK_NUMBERS = 1 << 19
"""How many numbers are converted to float32 at a time: few enough to stay in a processor's cache, enough for BLAS."""


class QuantizedTokens:
    """Quantized keys, or values, of consecutive tokens of each row, converted for float32 products. `parts` are codes
    `[rows, heads, tokens, words]`, scales and biases `[rows, heads, tokens, groups]`.
    """

    def __init__(self, parts: Sequence[mx.array], form: Quantization) -> None:
        words, scales, biases = parts
        self.tokens = words.shape[2]
        bytes_ = words.view(mx.uint8)
        halves = (bytes_,) if form.bits == 8 else (bytes_ & 15, bytes_ >> 4)
        self._numbers = [half.astype(mx.float32) for half in halves]
        self._scales, self._biases = scales.astype(mx.float32), biases.astype(mx.float32)
        self._group = form.group
        self._of_heads = scales.shape[-1] == 1
        if not self._of_heads:
            groups = (*scales.shape, -1)
            self._numbers = [(n.reshape(groups) * self._scales[..., None]).reshape(n.shape) for n in self._numbers]

    def key_products(self, queries: mx.array) -> mx.array:
        """Return the products `[rows, heads, queries, tokens]` of queries `[rows, heads, queries, dim]` and keys."""
        codes_per_byte = len(self._numbers)
        parts = [queries[..., i::codes_per_byte] @ n.swapaxes(-1, -2) for i, n in enumerate(self._numbers)]
        products = parts[0] if codes_per_byte == 1 else parts[0] + parts[1]
        sums = queries.reshape(*queries.shape[:-1], -1, self._group).sum(axis=-1)
        if self._of_heads:
            return products * self._scales.swapaxes(-1, -2) + sums * self._biases.swapaxes(-1, -2)
        return products + sums @ self._biases.swapaxes(-1, -2)

    def weighted_sum(self, weights: mx.array) -> mx.array:
        """Return the sums `[rows, heads, queries, dim]` of the values, weighted by `[rows, heads, queries, tokens]`."""
        biases = weights @ self._biases
        scaled_weights = weights * self._scales.swapaxes(-1, -2) if self._of_heads else weights
        parts = [scaled_weights @ n for n in self._numbers]
        sums = parts[0] if len(parts) == 1 else mx.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
        return sums + (biases if self._of_heads else mx.repeat(biases, self._group, axis=-1))


def split_quantized(
    slab: Sequence[mx.array], tail: Sequence[mx.array] | None, block: mx.array, form: Quantization, *, values: bool
) -> list[QuantizedTokens]:
    """Return the rows' keys, or with `values` their values, in chunks of tokens that fit a processor's cache. They come
    from the blocks `block` `[rows, heads, blocks]` of a `slab` (arrays `[heads * blocks, block_size, numbers]`),
    followed by those of the `tail`.
    """
    part_slice = slice(-QUANTIZED_PARTS, None) if values else slice(QUANTIZED_PARTS)
    arrays, (rows, heads, blocks) = slab[part_slice], block.shape
    words, block_size = arrays[0].shape[2], arrays[0].shape[1]
    size = max(1, CHUNK_NUMBERS // (rows * heads * block_size * words * 32 // form.bits))
    chunks: list[QuantizedTokens] = []
    for start in range(0, max(blocks, 1), size):
        chunk_blocks = block[..., start : start + size] if blocks > size else block
        tokens = chunk_blocks.shape[-1] * block_size
        parts = [a[chunk_blocks].reshape(rows, heads, tokens, a.shape[-1]) for a in arrays]
        if tail is not None and start + size >= blocks:
            parts = [mx.concatenate(list(pair), axis=2) for pair in zip(parts, tail[part_slice], strict=True)]
        chunks.append(QuantizedTokens(parts, form))
    return chunks


def key_products(queries: mx.array, keys: Sequence[QuantizedTokens]) -> mx.array:
    """Return the products of queries with the keys of all chunks."""
    products = [chunk.key_products(queries) for chunk in keys]
    return products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)


def weighted_sum(weights: mx.array, values: Sequence[QuantizedTokens]) -> mx.array:
    """Return the weighted sum of the values of all chunks."""
    total, start = None, 0
    for chunk in values:
        part = chunk.weighted_sum(weights[..., start : start + chunk.tokens])
        total, start = part if total is None else total + part, start + chunk.tokens
    assert total is not None
    return total
