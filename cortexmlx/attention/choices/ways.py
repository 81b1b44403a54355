"""The ways to compute the attention of single tokens, which classes each serves, and those that are not the kernels'.

All have the arguments and the result of `reference.attend_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import mlx.core as mx

from cortexmlx.attention import reference
from cortexmlx.attention.choices import row_by_row
from cortexmlx.attention.choices.batch_class import BatchClass
from cortexmlx.attention.choices.layer import LayerAttention
from cortexmlx.attention.paged import PagedKV
from cortexmlx.attention.reference_step import ReferenceStep
from cortexmlx.attention.softmax import Softmax
from cortexmlx.metal.shape import Kernel

MOST_COPIED = 64 << 20
"""Bytes of keys and values that a way may copy in a layer. A class whose steps may be larger has no such way."""

AttendRows = Callable[
    [mx.array, PagedKV, float, mx.array | None, float | None, mx.array | None],
    mx.array,
]


class Way(Enum):
    """A way to compute the attention of single tokens. The value names it in tables, on disk too."""

    VECTOR = "vector kernel"
    MATRIX = "matrix kernel"
    WIDE = "wide kernel"
    REFERENCE = "reference path"
    VIEW = "MLX over the view"
    """MLX's attention over the view of a lone row's run, followed by a copy of the tail."""
    GATHER = "MLX over a gather"
    """MLX's attention over a copy of all rows' tokens, each row as long as the longest."""
    ROWS = "row by row"
    """One row after the other, so that no row depends on its neighbours. It is not timed: it is for `reproducible`."""


KERNELS = {Way.VECTOR: Kernel.VECTOR, Way.MATRIX: Kernel.MATRIX, Way.WIDE: Kernel.WIDE}
"""The ways that are kernels of ours."""


def over_view(
    queries: mx.array,
    kv: PagedKV,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
    slopes: mx.array | None,
) -> mx.array:
    """Attend with a lone row that is one run, by MLX's attention. In a step without a tail nothing is copied."""
    run = kv.step.runs[0]
    assert run is not None
    length, tail = int(kv.step.lengths[0]), kv.tail_tokens
    oldest = kv.step.attention_window.oldest(max(length + tail - 1, 0))
    begin = min(oldest, length)
    keys, values = (array[:, begin:] for array in kv.arena.view(kv.layer, run, length))
    if kv.tail is not None:
        newest = [array[0, :, oldest - begin : tail] for array in kv.tail]
        keys, values = mx.concatenate([keys, newest[0]], axis=1), mx.concatenate([values, newest[1]], axis=1)
    out = mx.fast.scaled_dot_product_attention(queries[:1], keys[None], values[None], scale=scale, sinks=sinks)
    return out.astype(queries.dtype)


def over_gather(
    queries: mx.array,
    kv: PagedKV,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
    slopes: mx.array | None,
) -> mx.array:
    """Attend by MLX's attention over a copy of each row's tokens, with a mask."""
    softmax = Softmax(scale, sinks, softcap, queries.dtype, ReferenceStep.of(kv).ones, slopes)
    return reference.attend_gathered(queries[: kv.step.rows], kv, softmax).astype(queries.dtype)


PLAIN: dict[Way, AttendRows] = {
    Way.REFERENCE: reference.attend_rows,
    Way.VIEW: over_view,
    Way.GATHER: over_gather,
    Way.ROWS: row_by_row.attend_rows,
}
"""The ways that are operations of MLX."""


def plain_ways(layer: LayerAttention, batch: BatchClass) -> tuple[Way, ...]:
    """Return the ways of `PLAIN` that serve a class of steps, the reference path first. Below float32 a CPU has that
    one only (see `reference.rounds_coarsely`).
    """
    spec, most = layer.spec, batch.most
    numbers = spec.kv_heads * sum(spec.dims) * spec.itemsize
    if layer.coarse or most is None or most * numbers > MOST_COPIED or spec.value_in_key or layer.slopes:
        return (Way.REFERENCE,)
    if batch.run:
        plain = spec.kv_bits is None and layer.softcap is None
        return (Way.REFERENCE, Way.VIEW) if plain else (Way.REFERENCE,)
    return (Way.REFERENCE,) if layer.sinks and layer.softcap is not None else (Way.REFERENCE, Way.GATHER)
