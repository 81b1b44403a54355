"""Which shapes the kernels serve, and how a shape fills a threadgroup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.metal import sim
from cortexmlx.metal.kernels import DecodeKernels, kernel_text
from cortexmlx.metal.rules import (
    DTYPES,
    MATRIX_RULES,
    REGISTERS,
    THREADGROUP_BYTES,
    THREADS,
    Kernel,
    Variant,
    lane_numbers,
    refusal,
    why_vector,
)
from support.paged_problem import attend, random_rows

DIMS = st.integers(2, 64).map(lambda n: 4 * n)


def test_every_variant_fits_a_threadgroup() -> None:
    for dim in (64, 80, 96, 112, 128, 192, 256):
        for group in range(1, 33):
            v = Variant("float32", "float32", dim, dim, 32, group)
            assert refusal(v) is None or (dim == 256 and group > 28)
            assert v.tile * v.tiles >= group > v.tile * (v.tiles - 1)
    assert refusal(Variant("float32", "float32", 256, 256, 32, 71)) is not None


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), DIMS, DIMS, st.integers(1, 100))
def test_what_is_served_keeps_every_limit(dtype: str, kv_dtype: str, key_dim: int, value_dim: int, group: int) -> None:
    v = Variant(dtype, kv_dtype, key_dim, value_dim, 32, group)
    if v.kernel is Kernel.VECTOR:
        query, token = ({"float32": 4, "float16": 2, "bfloat16": 4}[t] for t in (dtype, kv_dtype))  # in a register
        key, value = lane_numbers(key_dim), lane_numbers(value_dim)
        assert v.tile * (key * query + (value + 1) * 4) + v.ahead * max(key, value) * token <= 4 * REGISTERS
        assert v.tile in (1, 2, 4, 8) and v.ahead in (2, 4, 8) and v.tile * v.ahead <= 32, "sums that 32 lanes can have"
    if refusal(v) is None:
        assert v.threads % 32 == 0 and 0 < v.threads <= THREADS
        assert v.threadgroup_bytes <= THREADGROUP_BYTES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "int8"}, "float32, float16 and bfloat16"),
        ({"kv_dtype": "int8"}, "float32, float16 and bfloat16"),
        ({"key_dim": 18}, "a multiple of 4"),
        ({"value_dim": 130}, "a multiple of 4"),
        ({"key_dim": 4}, "between 8 and 256"),
        ({"value_dim": 260}, "between 8 and 256"),
        ({"group": 120}, "more than 448 threads"),
        ({"query_tokens": 5}, "several query tokens"),
    ],
)
def test_what_is_not_served_says_why(change: dict[str, Any], says: str) -> None:
    served = Variant("float16", "float16", 128, 128, 32, 4)
    assert refusal(served) is None
    assert says in str(refusal(replace(served, **change)))


@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 112), (17, 128), (3, 64), (5, 112), (9, 128)])
def test_a_decode_threadgroup_has_the_memory_that_its_rule_counts(group: int, dim: int) -> None:
    v = Variant("float32", "float32", dim, dim, 32, group)
    with sim.recording() as recorded:
        attend(DecodeKernels(sim.metal_kernel), v, random_rows(v, [40]))
    assert recorded.launches[0].threadgroup_memory == v.threadgroup_bytes


@pytest.mark.parametrize("group", range(3, 17))
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 112, 120, 128, 192, 256])
def test_three_to_sixteen_query_heads_meet_their_keys_as_matrices(dim: int, group: int) -> None:
    for dtype in DTYPES if dim < 256 else DTYPES[1:]:
        v = Variant(dtype, dtype, dim, dim, 32, group)
        assert v.kernel is Kernel.MATRIX and why_vector(v) is None and refusal(v) is None
        assert v.label.endswith(", matrix kernel")
        assert 8 * v.tiles >= group > 8 * (v.tiles - 1)
        assert v.value_dim // v.parts <= 128 and v.threads == 32 * v.slices * v.tiles * v.parts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": 2}, "columns empty"),
        ({"group": 17}, "a third tile"),
        ({"group": 3, "query_tokens": 6}, "a third tile"),
        ({"key_dim": 68}, "matrices of 8 rows"),
        ({"value_dim": 100}, "matrices of 8 rows"),
        ({"value_dim": 136}, "matrices of 8 rows"),
        ({"block_size": 4}, "matrices of 8 rows"),
        ({"key_dim": 56}, "below 64"),
        ({"dtype": "float32", "key_dim": 200}, "192 in float32"),
    ],
)
def test_what_the_vector_kernel_serves_instead_says_why(change: dict[str, Any], says: str) -> None:
    matrix = Variant("float16", "float16", 128, 128, 32, 4)
    v = replace(matrix, **change)
    assert v.kernel is Kernel.VECTOR and says in str(why_vector(v)) and "matrix kernel" not in v.label
    assert replace(matrix, forced=Kernel.VECTOR).kernel is Kernel.VECTOR
    assert replace(matrix, group=1, query_tokens=2).kernel is Kernel.MATRIX


def test_every_rule_for_the_matrix_kernel_has_a_shape_that_breaks_it_alone() -> None:
    broken = [{"group": 1}, {"key_dim": 68}, {"value_dim": 48}]
    for rule, change in zip(MATRIX_RULES, broken, strict=True):
        v = replace(Variant("float16", "float16", 128, 128, 32, 4), **change)
        assert [r for r in MATRIX_RULES if not r.holds(v)] == [rule]


@pytest.mark.parametrize("dim", [8, 12, 64, 80, 96, 100, 112, 128, 192, 256])
def test_the_kernels_count_a_lanes_numbers_and_a_partials_floats_as_the_rules_do(dim: int) -> None:
    kernel = sim.metal_kernel(
        name="counts",
        input_names=[],
        output_names=["counts"],
        source="counts[0] = LaneLayout<DIM>::COUNT; counts[1] = sizeof(Partial<DIM>) / sizeof(float);",
        header=kernel_text("paged_attention.h"),
    )
    one = (1, 1, 1)
    (counts,) = kernel(
        inputs=[],
        template=[("DIM", dim)],
        grid=one,
        threadgroup=one,
        output_shapes=[(2,)],
        output_dtypes=[mx.int32],
    )
    v = Variant("float16", "float16", dim, dim, 32, 1)
    assert counts.tolist() == [lane_numbers(dim), v.partial_floats]
