"""The arithmetic of the kernels, against counts made by hand, and the products that attention cannot do without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortexmlx.metal.cost.arithmetic import mlx_decode, paged_decode, paged_matrix, paged_wide
from cortexmlx.metal.cost.cycles import Kind
from cortexmlx.metal.rules import VARIANTS, Variant
from cortexmlx.metal.shape import Kernel


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.label)
def test_no_kernel_does_without_the_products_of_attention(variant: Variant) -> None:
    lanes = (variant.key_dim + variant.value_dim) / 32
    if variant.kernel is Kernel.WIDE:
        return  # by matrices alone
    vector = paged_decode(replace(variant, forced=Kernel.VECTOR))
    assert vector[Kind.ARITHMETIC] >= variant.group * lanes
    if variant.key_dim == variant.value_dim:
        assert mlx_decode(variant.key_dim, variant.group)[Kind.ARITHMETIC] >= variant.group * lanes


def test_eight_heads_of_128_by_hand() -> None:
    """A tile of 8 heads, 4 tokens at a time. Per token and head 4 + 4 products. For 4 tokens 32 sums become one: 31
    additions, of which the first 16 begin a product and 3 are of tokens, with 2 selections each; 8 selections put it
    where it belongs, 7 fetch a weight. Per slice of 32 tokens a lane has 8 scores, of 7 operations and an exponential
    each; 2 exchanges and maxima, the factor (2 and an exponential), a sum and 8 * 4 outputs rescaled.
    """
    work = paged_decode(Variant("float16", "float16", 128, 128, 32, 8, forced=Kernel.VECTOR))
    assert work == {
        Kind.ARITHMETIC: 8 * 8 + (31 - 16 + 6 + 8 + 7) / 4 + (8 * 7 + 2 + 3 + 32) / 32,
        Kind.EXPONENT: (8 + 1) / 32,
    }


def test_a_tile_that_is_not_full_costs_what_a_full_one_does() -> None:
    five, six = (
        paged_decode(Variant("float32", "float32", 256, 256, 32, group, forced=Kernel.VECTOR)) for group in (5, 6)
    )
    assert five == six


def test_softcap_adds_to_the_softmax() -> None:
    plain, capped = (paged_decode(Variant("float16", "float16", 256, 256, 32, 2, softcap=c)) for c in (False, True))
    assert capped[Kind.EXPONENT] == plain[Kind.EXPONENT] + 2 / 32
    assert capped[Kind.RECIPROCAL] == 2 * 2 / 32


def test_slopes_add_three_operations_to_a_score() -> None:
    """A lane of the vector kernel has as many scores of a slice as its tile heads; of the matrix kernel, eight."""
    for group, kernel, scores in ((2, paged_decode, 2), (4, paged_matrix, 8)):
        plain, biased = (kernel(Variant("float16", "float16", 128, 128, 32, group, alibi=a)) for a in (False, True))
        assert biased[Kind.ARITHMETIC] == pytest.approx(plain[Kind.ARITHMETIC] + 3 * scores / 32)


def test_the_matrix_kernel_by_hand() -> None:
    """Per slice of 32 tokens and two queries a lane: 4 scores of 7, 3 to raise the maximum, 16 numbers to rescale."""
    wanted = {Kind.ARITHMETIC: 2 * (4 * 7 + 3 + 16) / 32, Kind.EXPONENT: 2 * 5 / 32}

    def matrix(dim: int, group: int) -> dict[Kind, float]:
        return paged_matrix(Variant("float16", "float16", 128, dim, 32, group, forced=Kernel.MATRIX))

    assert matrix(128, 3) == matrix(128, 8) == wanted
    two_tiles = matrix(128, 9)
    assert two_tiles == {kind: 2 * count for kind, count in wanted.items()}
    assert matrix(256, 8) == two_tiles, "the softmax twice, and the output once"


def test_the_wide_kernel_by_hand() -> None:
    """Per slice of 16 tokens and part a lane has 4 scores of one query: the sum of 4 parts' and 7 more; 3 to raise the
    maximum, 32 numbers to rescale.
    """
    wanted = {Kind.ARITHMETIC: 4 * (4 * (4 + 7) + 3 + 32) / 16, Kind.EXPONENT: 4 * 5 / 16}
    assert all(paged_wide(Variant("float16", "float16", 512, 512, 32, group)) == wanted for group in (1, 8))
    assert paged_wide(Variant("float16", "float16", 576, 512, 32, 128, latent=True)) == {
        kind: 16 * count for kind, count in wanted.items()
    }
    eight_parts = paged_wide(Variant("bfloat16", "bfloat16", 576, 512, 32, 8, latent=True))
    assert eight_parts[Kind.ARITHMETIC] == 8 * (4 * (8 + 7) + 3 + 16) / 16
    capped = paged_wide(Variant("float16", "float16", 512, 512, 32, 8, softcap=True))
    assert capped[Kind.EXPONENT] - wanted[Kind.EXPONENT] == 4 * 4 / 16 and capped[Kind.RECIPROCAL] == 4 * 4 * 2 / 16


def test_mlx_has_the_softmax_in_every_lane_for_every_token() -> None:
    assert mlx_decode(128, 1) == {Kind.ARITHMETIC: 4 + 8 + 6, Kind.EXPONENT: 2.0}
    assert mlx_decode(64, 8) == {Kind.ARITHMETIC: 8 * (2 + 4 + 6), Kind.EXPONENT: 16.0}
