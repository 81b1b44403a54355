"""The arithmetic of the decode kernels per token and KV head, counted from their text.

A lower bound: the products, the online softmax and the selections that the text asks for. Addresses, loop counters,
moves and masks of active lanes, which a compiler adds, are not in it. Halves count as floats: an instruction takes
either as an operand at no cost (philipturner/metal-benchmarks). An exponential is a multiplication by log2(e) and an
exp2.
"""

from __future__ import annotations

from cortexmlx.metal.cost.cycles import Kind
from cortexmlx.metal.rules import Variant, lane_numbers

SLICE = 32
"""Tokens of a slice in paged_decode.metal: each lane has the softmax of one."""


def paged_decode(variant: Variant) -> dict[Kind, float]:
    """paged_decode.metal. A last tile that is not full computes as if it were.

    Per head and token: the products of key and value, and the selection of the lane that keeps the score. Per head and
    slice: two exponentials of differences, the maximum, two selections of what is live, the sum, the rescaling.
    """
    heads = variant.tile * variant.tiles
    keys, values = lane_numbers(variant.key_dim), lane_numbers(variant.value_dim)
    softmax = 2 * 2 + 1 + 2 + 1 + values
    capped = {Kind.ARITHMETIC: 4.0, Kind.EXPONENT: 1.0, Kind.RECIPROCAL: 2.0} if variant.softcap else {}
    return {
        Kind.ARITHMETIC: heads * (keys + values + 1 + (softmax + capped.get(Kind.ARITHMETIC, 0.0)) / SLICE),
        Kind.EXPONENT: heads * (2 + capped.get(Kind.EXPONENT, 0.0)) / SLICE,
        **({Kind.RECIPROCAL: heads * capped[Kind.RECIPROCAL] / SLICE} if capped else {}),
    }


def mlx_decode(dim: int, group: int) -> dict[Kind, float]:
    """MLX's `sdpa_vector`, `_2pass_1` and `_2pass_1_gqa`: the same in every lane for each head and token.

    Two exponentials of differences, the maximum, the sum, the product with the key, the output rescaled and added to.
    """
    numbers = dim / 32
    return {Kind.ARITHMETIC: group * (2 * 2 + 1 + 1 + numbers + 2 * numbers), Kind.EXPONENT: group * 2.0}
