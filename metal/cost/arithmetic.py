"""The arithmetic of the decode kernels per token and KV head, counted from their text.

It is a lower bound: the products, the online softmax and the selections that the text asks for. It leaves out what a
compiler adds: addresses, loop counters, moves and masks of active lanes. Halves count as floats, because an instruction
takes either as an operand at no cost (philipturner/metal-benchmarks). An exponential is a multiplication by log2(e) and
an exp2.
"""

from __future__ import annotations

from math import log2

from cortexmlx.metal.cost.cycles import Kind
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.vector import VectorGeometry, lane_numbers

SLICE = 32
"""Tokens of a slice in paged_decode.metal. A lane computes the softmax of as many of them as a tile has heads."""
_BIAS = 3
"""Instructions that ALiBi adds to a score: a difference of positions, its conversion to float, an fma."""


def paged_decode(variant: Variant) -> dict[Kind, float]:
    """Return the arithmetic of paged_decode.metal. An incomplete last tile costs as much as a full one.

    - Per head and token: the products of key and value.
    - Per step of `ahead` tokens and tile: an addition for each sum that lanes exchange, two selections for each
      exchange of
      tokens, and the selections of the score and the weight from those that a lane keeps. The additions of the first
      exchange of heads cost nothing: they are part of a product's fma.
    - Per slice and tile, for each of a lane's scores: the scale, two selections for what is live, the maximum, an
      exponential of a difference, the sum.
    - Per slice and tile: the maximum among lanes, and the rescaling of all sums.
    """
    geometry = VectorGeometry(variant)
    tile, ahead, tiles = geometry.tile, geometry.ahead, geometry.tiles
    keys, values = lane_numbers(variant.key_dim), lane_numbers(variant.value_dim)
    others = log2(32 // (tile * ahead))
    step = (tile - 1 - tile // 2) * ahead + 3 * (ahead - 1) + others + tile + tile - 1
    capped = {Kind.ARITHMETIC: 4.0, Kind.EXPONENT: 1.0, Kind.RECIPROCAL: 2.0} if variant.softcap else {}
    score = 1 + 2 + 1 + 2 + 1 + capped.get(Kind.ARITHMETIC, 0.0) + _BIAS * variant.alibi
    slice_ = tile * score + log2(32 // tile) + 3 + tile * values
    return {
        Kind.ARITHMETIC: tiles * (tile * (keys + values) + step / ahead + slice_ / SLICE),
        Kind.EXPONENT: tiles * (tile * (1 + capped.get(Kind.EXPONENT, 0.0)) + 1) / SLICE,
        **({Kind.RECIPROCAL: tiles * tile * capped[Kind.RECIPROCAL] / SLICE} if capped else {}),
    }


def paged_matrix(variant: Variant) -> dict[Kind, float]:
    """Return the arithmetic of paged_matrix.metal. An incomplete last tile costs as much as a full one. Each part of a
    value computes all scores.

    Per slice and lane, for each of two queries: the rescaling of the output, and for each of four scores the scaling,
    the maximum, two selections for what is live, the difference in base 2 and the sum.
    """
    geometry = variant.geometry
    simdgroups = geometry.tiles * geometry.parts
    capped = {Kind.ARITHMETIC: 4.0, Kind.EXPONENT: 1.0, Kind.RECIPROCAL: 2.0} if variant.softcap else {}
    each = 1 + 1 + 2 + 2 + 1 + capped.get(Kind.ARITHMETIC, 0.0) + _BIAS * variant.alibi
    rescaling = 2 + 1 + variant.value_dim / geometry.parts / 8
    return {
        Kind.ARITHMETIC: simdgroups * 2 * (4 * each + rescaling) / SLICE,
        Kind.EXPONENT: simdgroups * 2 * (4 * (1 + capped.get(Kind.EXPONENT, 0.0)) + 1) / SLICE,
        **({Kind.RECIPROCAL: simdgroups * 2 * 4 * capped[Kind.RECIPROCAL] / SLICE} if capped else {}),
    }


def paged_wide(variant: Variant) -> dict[Kind, float]:
    """Return the arithmetic of paged_wide.metal. An incomplete last tile costs as much as a full one. Each part
    computes all scores of its tile.

    Per slice and lane, for one query: the sum of the parts' scores, and then the same as in the matrix kernel.
    """
    geometry = variant.geometry
    simdgroups = geometry.tiles * geometry.parts
    capped = {Kind.ARITHMETIC: 4.0, Kind.EXPONENT: 1.0, Kind.RECIPROCAL: 2.0} if variant.softcap else {}
    scores = geometry.slice_tokens * geometry.tile / 32
    each = geometry.parts + 1 + 1 + 2 + 2 + 1 + capped.get(Kind.ARITHMETIC, 0.0)
    rescaling = 2 + 1 + variant.value_dim / geometry.parts / 4
    lane_slices = simdgroups / geometry.slice_tokens
    return {
        Kind.ARITHMETIC: lane_slices * (scores * each + rescaling),
        Kind.EXPONENT: lane_slices * (scores * (1 + capped.get(Kind.EXPONENT, 0.0)) + 1),
        **({Kind.RECIPROCAL: lane_slices * scores * capped[Kind.RECIPROCAL]} if capped else {}),
    }


def mlx_decode(dim: int, group: int) -> dict[Kind, float]:
    """Return the arithmetic of MLX's `sdpa_vector`, `_2pass_1` and `_2pass_1_gqa`. Every lane does the same per head
    and token.

    It is two exponentials of differences, the maximum, the sum, the product with the key, and the output, which is
    rescaled and added to.
    """
    numbers = dim / 32
    return {Kind.ARITHMETIC: group * (2 * 2 + 1 + 1 + numbers + 2 * numbers), Kind.EXPONENT: group * 2.0}
