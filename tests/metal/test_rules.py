"""Which kernel serves a shape, and whether one does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import HALVES, THREADGROUP_BYTES, VARIANTS, Variant, refusal
from cortexmlx.metal.shape import DTYPES, Kernel
from support.kernels.paged_problem import attend, random_rows


def test_any_number_of_query_heads_is_served() -> None:
    for dim in (64, 80, 96, 112, 128, 192, 256):
        for group in (*range(1, 33), 71, 128):
            v = Variant("float32", "float32", dim, dim, 32, group)
            assert refusal(v) is None
            assert v.geometry.tile * v.geometry.tiles >= group > v.geometry.tile * (v.geometry.tiles - 1)


@given(
    st.sampled_from(list(Kernel)),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(2, 144).map(lambda n: 4 * n),
    st.integers(2, 144).map(lambda n: 4 * n),
    st.integers(1, 130),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_threadgroup_has_one_tile_and_one_part_and_keeps_every_limit(
    kernel: Kernel, dtype: str, kv_dtype: str, key_dim: int, value_dim: int, group: int, tokens: int, latent: bool
) -> None:
    v = Variant(
        dtype, kv_dtype, key_dim, value_dim, 32, group, query_tokens=tokens, latent=latent, forced_kernel=kernel
    )
    if refusal(v) is None:
        g = v.geometry
        assert g.threads in (128, 256) and g.threadgroup_bytes <= THREADGROUP_BYTES
        assert g.threads == 128 or g.tiles == 1 or kernel is Kernel.WIDE, "several tiles are threadgroups of 128"
        assert g.threadgroups == g.tiles * (1 if kernel is Kernel.WIDE else g.parts)


def test_bfloat16_is_checked_wherever_float16_is() -> None:
    shapes = [{replace(v, dtype="float16", kv_dtype="float16") for v in VARIANTS if v.dtype == t} for t in HALVES]
    assert shapes[0] == shapes[1] and len(shapes[0]) > 50


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "int8"}, "float32, float16 and bfloat16"),
        ({"kv_dtype": "int8"}, "float32, float16 and bfloat16"),
        ({"key_dim": 18}, "a multiple of 4"),
        ({"query_tokens": 5}, "several query tokens"),
        ({"kv_bits": 3, "quant_group": 64}, "8 or 4 bits"),
        ({"kv_bits": 8, "quant_group": 16}, "groups of 32 or 64"),
        ({"kv_bits": 8}, "groups of 32 or 64"),
        ({"quant_group": 64}, "8 or 4 bits"),
        ({"kv_bits": 8, "quant_group": 64, "key_dim": 96}, "a multiple of the quantization group"),
        ({"kv_bits": 4, "quant_group": 32, "value_dim": 80}, "a multiple of the quantization group"),
    ],
)
def test_what_is_not_served_says_why(change: dict[str, Any], says: str) -> None:
    served = Variant("float16", "float16", 128, 128, 32, 4)
    assert refusal(served) is None
    assert says in str(refusal(replace(served, **change)))


def test_a_variant_is_found_by_its_fields_and_by_no_other() -> None:
    v = Variant("float16", "float16", 128, 128, 32, 4)
    assert {v: "it"}[replace(v)] == "it" and hash(v) == hash(replace(v))
    others = [
        replace(v, forced_kernel=Kernel.MATRIX),
        replace(v, group=8),
        replace(v, sinks=True),
        replace(v, latent=True),
    ]
    assert len({hash(other) for other in (v, *others)}) == 5


@pytest.mark.parametrize(("bits", "of"), [(8, 32), (8, 64), (4, 32), (4, 64)])
def test_quantized_keys_and_values_are_served_where_groups_fit(bits: int, of: int) -> None:
    for dtype in DTYPES:
        for dim in (64, 96, 128, 192, 256):
            v = Variant(dtype, dtype, dim, dim, 32, 4, kv_bits=bits, quant_group=of)
            assert (refusal(v) is None) == (dim % of == 0)
            assert f"{bits}-bit KV in groups of {of}" in v.label
            cut = dim == 192 and of == 64  # in halves of 96
            on_matrices = replace(v, forced_kernel=Kernel.MATRIX)
            assert dim % of or (refusal(on_matrices) is not None) == (cut or (dtype == "float32" and dim == 256))


def test_a_forced_kernel_says_what_it_does_not_serve() -> None:
    v = Variant("float16", "float16", 128, 128, 32, 17)
    assert v.kernel is Kernel.VECTOR and "matrix" not in v.label
    forced = replace(v, forced_kernel=Kernel.MATRIX)
    assert forced.label.endswith(", matrix kernel") and "at most two tiles" in str(refusal(forced))


@pytest.mark.parametrize(
    ("dtype", "dim", "first"),
    [
        ("float16", 64, 3),
        ("float16", 96, 3),
        ("float16", 112, 5),
        ("float16", 128, 5),
        ("bfloat16", 64, 3),
        ("bfloat16", 96, 3),
        ("bfloat16", 112, 3),
        ("bfloat16", 128, 5),
        ("bfloat16", 192, 5),
        ("bfloat16", 256, 5),
        ("float32", 128, 5),
    ],
)
def test_the_matrix_kernel_serves_where_so_many_heads_share_a_key_that_it_spends_less(
    dtype: str, dim: int, first: int
) -> None:
    kernels = [Variant(dtype, dtype, dim, dim, 32, group).kernel for group in range(1, 9)]
    assert kernels == [Kernel.VECTOR] * (first - 1) + [Kernel.MATRIX] * (9 - first)


def test_a_wide_value_for_which_scores_would_be_computed_twice_is_the_vector_kernels() -> None:
    assert all(Variant("float16", "float16", 192, 192, 32, group).kernel is Kernel.VECTOR for group in range(1, 18))
    assert Variant("float16", "float16", 192, 128, 32, 8).kernel is Kernel.MATRIX


def test_several_query_tokens_are_the_matrix_kernels_even_where_one_is_not() -> None:
    v = Variant("float16", "float16", 192, 192, 32, 2)
    assert v.kernel is Kernel.VECTOR and replace(v, query_tokens=2).kernel is Kernel.MATRIX


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_partial_results_are_less_than_a_tenth_of_what_is_read(dim: int, dtype: str) -> None:
    """Written once and read once, in float32. What a shape has fewer of is cut in shorter partitions."""
    numbers, heads = 256 * 2 * dim * {"float32": 4, "float16": 2, "bfloat16": 2}[dtype], range(1, 25)
    for v in (Variant(dtype, dtype, dim, dim, 32, group) for group in heads):
        partition = v.geometry.partition
        assert 2 * 4 * v.group * (dim + 2) <= 0.1 * partition / 256 * numbers
        assert partition == 256 or 2 * 4 * v.group * (dim + 2) > 0.1 * numbers
    several = Variant(dtype, dtype, dim, dim, 32, 2, query_tokens=8)
    assert several.geometry.partition == 256, "a row's sums are cut where they are with one query token"


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 112), (17, 128), (3, 64), (5, 112), (9, 128), (9, 192)])
def test_a_decode_threadgroup_has_the_memory_that_its_rule_counts(group: int, dim: int) -> None:
    v = Variant("float32", "float32", dim, dim, 32, group)
    with sim.recording() as recorded:
        attend(DecodeKernels(sim.metal_kernel), v, random_rows(v, [40]))
    assert recorded.launches[0].threadgroup_memory == v.geometry.threadgroup_bytes
