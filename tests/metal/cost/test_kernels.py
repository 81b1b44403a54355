"""The kernels of the sheet: what is counted follows from how each shares keys and values among query heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortexmlx.metal.compare.mlx_decode import has_two_pass_gqa
from cortexmlx.metal.cost.cycles import Kind, cycles
from cortexmlx.metal.cost.kernels import beside, mlx, paged
from cortexmlx.metal.rules import Variant
from cortexmlx.metal.shape import Kernel
from cortexmlx.metal.vector import VectorGeometry


def variant(dim: int, group: int) -> Variant:
    return Variant("float16", "float16", dim, dim, 32, group, forced=Kernel.VECTOR)


def test_ours_loads_each_number_once_whatever_the_group() -> None:
    for group in (1, 8):
        cost = paged(variant(64, group))
        assert cost.live_bytes == 2 * 64 * 2
        assert cost.counted.amplification == 1.0
        assert 2.0 < cost.work[Kind.LOAD] < 2.5, "a key and a value, and a fraction for tables, queries and partials"


@pytest.mark.parametrize("group", [1, 8])
def test_ours_exchanges_what_its_text_says(group: int) -> None:
    """For each token the places of key and value and a weight for each head; the sums of a step; the maximum and the
    factors of a slice; for each partition and simdgroup the final sum, and a factor for each head.
    """
    v = VectorGeometry(variant(64, group))
    work, steps, between = paged(variant(64, group)).work, 32 / v.ahead, {1: 5, 8: 2}[group]
    # 32 numbers of 32 lanes become one by 31 exchanges, 8 of one head by 7 and 2 more, for the quarters of a simdgroup.
    sums = {1: 7 + 2, 8: 31}[group]
    assert Kind.REDUCTION not in work and Kind.SHUFFLE_SAME not in work
    a_slice = steps * sums + between + group
    assert work[Kind.SHUFFLE_FIXED] == pytest.approx(2 + group + a_slice / 32 + v.slices * (between + group) / 256)


@pytest.mark.parametrize("group", [3, 8])
def test_the_matrix_kernel_exchanges_what_its_text_says(group: int) -> None:
    """Per 8 tokens a product for 8 numbers of the keys and of the values each, whatever the group; per slice of 32
    tokens and pair of queries three exchanges for the maximum, and per partition and simdgroup three for the sum.
    """
    cost = paged(replace(variant(64, group), forced=Kernel.MATRIX))
    assert cost.kernel == "paged_matrix" and cost.counted.amplification == 1.0
    assert cost.work[Kind.MATRIX_HALF] == 2 * 64 / 8 / 8
    assert cost.work[Kind.SHUFFLE_FIXED] == pytest.approx(2 * 3 * (1 / 32 + 4 / 256))
    assert Kind.REDUCTION not in cost.work


@pytest.mark.parametrize("latent", [True, False])
def test_the_wide_kernel_computes_no_product_twice_and_reads_latent_keys_once(latent: bool) -> None:
    """Per 8 tokens and tile of queries a product for 8 numbers of the keys and of the values each."""
    v = Variant("float16", "float16", 64 if latent else 288, 32, 32, 11, latent=latent)
    cost = paged(v)
    assert cost.kernel == "paged_wide" and cost.live_bytes == 2 * v.token_numbers
    assert cost.counted.amplification == v.geometry.tiles == 2, "a threadgroup for each tile"
    assert cost.work[Kind.MATRIX_HALF] == 2 * (v.key_dim + v.value_dim) / 8 / 8
    a_slice, a_partition = 2 / 16, 2 / v.geometry.partition
    assert cost.work[Kind.SHUFFLE_FIXED] == pytest.approx(2 * 4 * (a_slice + a_partition))
    assert Kind.REDUCTION not in cost.work


def test_mlx_pays_for_every_query_head() -> None:
    one, eight = (mlx("sdpa_vector_2pass_1", "float16", 128, group) for group in (1, 8))
    assert eight.counted.amplification == 8 * one.counted.amplification == 8
    assert cycles(eight.least) == pytest.approx(8 * cycles(one.least), rel=1e-6)


def test_the_sheet_has_mlx_beside_ours_where_mlx_has_a_kernel() -> None:
    names = [cost.kernel for cost in beside(replace(variant(64, 8), forced=None))]
    shared = ["sdpa_vector_2pass_1_gqa"] if has_two_pass_gqa() else []
    assert names == ["paged_matrix", "paged_decode", "sdpa_vector", "sdpa_vector_2pass_1", *shared]
    no_mlx = [cost.kernel for cost in beside(Variant("float16", "float16", 80, 80, 32, 1))]
    assert no_mlx == ["paged_decode", "paged_matrix"], "the one that serves first"


def test_the_least_is_all_that_was_counted_and_the_arithmetic_of_the_text() -> None:
    cost = mlx("sdpa_vector_2pass_1", "float16", 128, 8)
    by_hand = 8 * (14.54 + 18 + 2 * 2 + 2)  # a sum, arithmetic, two exponentials, a key and a value
    assert by_hand < cycles(cost.least) < 1.03 * by_hand, "the rest is what is done once for 128 tokens"


def test_what_was_compiled_takes_the_place_of_the_text() -> None:
    cost = replace(mlx("sdpa_vector_2pass_1", "float16", 128, 1), compiled={Kind.ARITHMETIC: 100.0, Kind.LOAD: 1.0})
    assert cost.work == {
        Kind.REDUCTION: 1.0,
        Kind.ARITHMETIC: 100.0,
        Kind.LOAD: cost.counted.work[Kind.LOAD] + 1,
    }
    assert replace(cost, compiled=None).work == cost.least
