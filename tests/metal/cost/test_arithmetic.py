"""The arithmetic of the kernels, against counts made by hand, and the products that attention cannot do without."""

from __future__ import annotations

import pytest

from cortexmlx.metal.cost.arithmetic import mlx_decode, paged_decode
from cortexmlx.metal.cost.cycles import Kind
from cortexmlx.metal.rules import VARIANTS, Variant


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.label)
def test_no_kernel_does_without_the_products_of_attention(variant: Variant) -> None:
    lanes = (variant.key_dim + variant.value_dim) / 32
    assert paged_decode(variant)[Kind.ARITHMETIC] >= variant.group * lanes
    if variant.key_dim == variant.value_dim:
        assert mlx_decode(variant.key_dim, variant.group)[Kind.ARITHMETIC] >= variant.group * lanes


def test_eight_heads_of_128_by_hand() -> None:
    """A tile of 8 heads. Per token 4 + 4 products and a selection each; per slice of 32 tokens and head 4 to rescale
    the output, 8 for the softmax, 2 exponentials.
    """
    work = paged_decode(Variant("float16", "float16", 128, 128, 32, 8))
    assert work == {Kind.ARITHMETIC: 8 * 9 + 8 * 12 / 32, Kind.EXPONENT: 8 * 2 / 32}


def test_a_tile_that_is_not_full_costs_what_a_full_one_does() -> None:
    five, six = (paged_decode(Variant("float32", "float32", 256, 256, 32, group)) for group in (5, 6))
    assert five == six


def test_softcap_adds_to_the_softmax() -> None:
    plain, capped = (paged_decode(Variant("float16", "float16", 256, 256, 32, 2, softcap=c)) for c in (False, True))
    assert capped[Kind.EXPONENT] == plain[Kind.EXPONENT] * 1.5
    assert capped[Kind.RECIPROCAL] == 2 * 2 / 32


def test_mlx_has_the_softmax_in_every_lane_for_every_token() -> None:
    assert mlx_decode(128, 1) == {Kind.ARITHMETIC: 4 + 8 + 6, Kind.EXPONENT: 2.0}
    assert mlx_decode(64, 8) == {Kind.ARITHMETIC: 8 * (2 + 4 + 6), Kind.EXPONENT: 16.0}
