"""The attention of single tokens, one row after the other: a row's result has the same bits alone and in any batch.

Each operation sees one row's tokens, in the same shapes whatever is computed beside it, and wherever the boundary
between arena and tail lies. That costs a copy of the tokens, and about ten operations for each row.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.attention.paged import PagedKV
from cortexmlx.attention.reference_step import ReferenceStep
from cortexmlx.attention.softmax import Softmax, divided
from cortexmlx.kv.arena import Slab
from cortexmlx.kv.step import GroupStep


def attend_rows(
    queries: mx.array,
    kv: PagedKV,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
    slopes: mx.array | None,
) -> mx.array:
    """See `reference.attend_rows`."""
    softmax = Softmax(scale, sinks, softcap, queries.dtype, ReferenceStep.of(kv).ones, slopes)
    parts = [_attend_row(queries[row : row + 1], kv, row, softmax) for row in range(kv.step.rows)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_row(query: mx.array, kv: PagedKV, row: int, softmax: Softmax) -> mx.array:
    """Attend with one query `[1, query_heads, 1, dim]` of a row."""
    newest = int(kv.step.lengths[row]) + kv.tail_tokens - 1
    oldest = kv.step.attention_window.oldest(max(newest, 0))
    seen = _tokens(kv, row, oldest)
    keys, values = seen[0], seen[-1] if kv.value_in_key is None else seen[0][..., : kv.value_in_key]
    heads, (_, query_heads, _, dim) = keys.shape[0], query.shape
    shape = (heads, query_heads // heads, 1)
    scores = softmax.scaled(query).reshape(heads, -1, dim) @ keys.swapaxes(-1, -2)
    distance = partial(ReferenceStep.distance, newest, newest + 1, oldest)
    weights, total = softmax.weights(softmax.biased(softmax.capped(scores), shape, distance), shape)
    return divided(weights @ values, total).astype(query.dtype).reshape(1, query_heads, 1, -1)


def _tokens(kv: PagedKV, row: int, oldest: int) -> Slab:
    """Return a copy of the keys and values of a row's tokens from `oldest` on, `[kv_heads, tokens, dim]` each."""
    slots = kv.derived.get(_RowSlots, kv.step).of(row, oldest, kv.arena.block_size)
    arrays = [mx.take(array, slots, axis=1) for array in kv.arena.slab(kv.layer)]
    if kv.tail is not None:
        column = max(0, oldest - int(kv.step.lengths[row]))
        newest = [array[row, :, column : kv.tail_tokens] for array in kv.tail]
        arrays = [mx.concatenate(list(both), axis=1) for both in zip(arrays, newest, strict=True)]
    # What `take` returns lies in another order: a product with it would be rounded in another way.
    arrays = [mx.contiguous(array) for array in arrays]
    return tuple(arrays) if kv.quantization is None else kv.quantization.dequantize(arrays)


class _RowSlots:
    """The slots of a step's rows, made once for all layers, and in layers without a window for a whole decode
    window.
    """

    def __init__(self, step: GroupStep) -> None:
        self._step = step
        self._slots: dict[int, tuple[int, mx.array]] = {}

    def of(self, row: int, oldest: int, block_size: int) -> mx.array:
        """Return the slots of a row's tokens in the arena from `oldest` on, `[tokens]` int32."""
        known = self._slots.get(row)
        if known is None or known[0] != oldest:
            position = np.arange(oldest, int(self._step.lengths[row]))
            slots = self._step.tables[row, position // block_size] * block_size + position % block_size
            self._slots[row] = known = (oldest, mx.array(slots.astype(np.int32)))
        return known[1]
