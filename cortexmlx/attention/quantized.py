"""The reference backend on quantized keys and values: single-token queries by `mx.gather_qmm`, which multiplies blocks
of codes where they lie, without a dequantized copy of the slab.
"""

from __future__ import annotations

import mlx.core as mx

from cortexmlx.attention.paged import PagedKV
from cortexmlx.kv.arena import Slab
from cortexmlx.kv.quantization import PARTS


def block_products(
    left: mx.array, kv: PagedKV, which_left: mx.array, which_block: mx.array, *, values: bool
) -> mx.array:
    """`left[which_left]` by the blocks of the layer's slab that `which_block` names (head h block b is h * all + b): by
    their keys transposed, or by their `values`.
    """
    form = kv.quantization
    assert form is not None
    codes, scales, biases = kv.arena.blocks_of(kv.layer)[PARTS * values :][:PARTS]
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


def plain(kv: PagedKV, arrays: Slab) -> Slab:
    """Keys and values of a slab, a view or a tail as numbers: of a quantized layer what the codes stand for."""
    return arrays if kv.quantization is None else kv.quantization.dequantize(arrays)
