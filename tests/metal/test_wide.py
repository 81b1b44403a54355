"""Which shapes the wide kernel serves, and how a shape fills its threadgroups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.metal.kernels import DecodeKernels
from cortexmlx.metal.lab import sim
from cortexmlx.metal.rules import VARIANTS, Variant, refusal
from cortexmlx.metal.shape import DTYPES, PARTITION, Kernel
from cortexmlx.metal.wide import WideGeometry
from support.kernels.paged_problem import attend, random_rows

LATENT = Variant("float16", "float16", 576, 512, 32, 16, latent=True)
APART = Variant("float16", "float16", 512, 512, 32, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 8, 16, 20, 128])
def test_latent_attention_and_wide_heads_are_served_with_any_number_of_queries(group: int, dtype: str) -> None:
    for wide in (LATENT, APART, replace(LATENT, key_dim=320, value_dim=256), replace(APART, query_tokens=8)):
        v = replace(wide, dtype=dtype, kv_dtype=dtype, group=group)
        g = v.geometry
        assert v.kernel is Kernel.WIDE and refusal(v) is None and v.label.endswith(", wide kernel")
        assert g.threads == 32 * g.parts <= 256 and g.threadgroups == g.tiles == -(-group * v.query_tokens // 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_dim": 608}, "more than 576"),
        ({"key_dim": 512, "value_dim": 544}, "more than 512"),
        ({"key_dim": 480}, "up to 64 more"),
        ({"key_dim": 320, "value_dim": 224}, "up to 64 more"),
        ({"key_dim": 568}, "multiples of 32"),
        ({"key_dim": 544, "kv_dtype": "bfloat16"}, "8 for latent keys"),
        ({"kv_dtype": "int8"}, "float32, float16 and bfloat16"),
        ({"alibi": True, "forced_kernel": Kernel.WIDE}, "ALiBi"),
    ],
)
def test_what_is_not_served_says_why(change: dict[str, Any], says: str) -> None:
    v = replace(LATENT, **change)
    assert v.kernel is Kernel.WIDE and says in str(refusal(v))


def test_narrow_heads_are_left_to_the_other_kernels_and_latent_ones_are_not_theirs() -> None:
    narrow = replace(APART, key_dim=256, value_dim=256)
    assert narrow.kernel is not Kernel.WIDE and "needs no barriers" in str(WideGeometry.refusal(narrow))
    for kernel in (Kernel.MATRIX, Kernel.VECTOR):
        assert "lie in their keys" in str(refusal(replace(LATENT, key_dim=128, value_dim=64, forced_kernel=kernel)))


def test_every_rule_has_a_shape_that_breaks_it_alone() -> None:
    broken = [
        {"latent": False, "key_dim": 256, "value_dim": 256},
        {"latent": False, "key_dim": 640},
        {"kv_bits": 8, "quant_group": 64},
        {"alibi": True},
        {"key_dim": 480},
        {"key_dim": 528},
    ]
    for rule, change in zip(WideGeometry.rules, broken, strict=True):
        v = replace(LATENT, **change)
        assert [r for r in WideGeometry.rules if not r.holds(v)] == [rule]


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 80).map(lambda n: 8 * n),
    st.integers(1, 64).map(lambda n: 8 * n),
    st.booleans(),
)
def test_the_shares_are_whole_matrices_and_fit_the_registers(
    dtype: str, kv_dtype: str, key_dim: int, value_dim: int, latent: bool
) -> None:
    v = Variant(dtype, kv_dtype, key_dim, value_dim, 32, 9, latent=latent)
    if v.kernel is not Kernel.WIDE or refusal(v) is not None:
        return
    parts = v.geometry.parts
    assert key_dim % (8 * parts) == value_dim % (8 * parts) == 0
    # Of a slice's latent keys and of the output a lane keeps so many registers of 32 bits until the next slice.
    kept = value_dim / parts * 16 / 32 * (0.5 if kv_dtype == "float16" else 1) if latent else 0
    assert kept + value_dim / parts * 8 / 32 <= 64


@pytest.mark.parametrize(
    "v",
    [*(v for v in VARIANTS if v.kernel is Kernel.WIDE), LATENT, APART, replace(APART, group=16)],
    ids=lambda v: v.label,
)
def test_partial_results_are_less_than_a_tenth_of_what_a_tile_of_queries_reads(v: Variant) -> None:
    """Written once and read once, for each tile of 8 queries: with more tiles there is more to compute, too."""
    size = {"float32": 4, "float16": 2, "bfloat16": 2}[v.kv_dtype]
    partials = 2 * min(8, v.group) * v.partial_floats * 4
    assert partials < 0.1 * v.geometry.partition * v.token_numbers * size
    if not v.latent and v.group <= 16:
        assert partials * v.geometry.tiles < 0.1 * v.geometry.partition * v.token_numbers * size
    assert v.geometry.partition % PARTITION == 0


@pytest.mark.parametrize(
    "v",
    [
        Variant("float32", "float32", 64, 32, 8, 11, latent=True),
        Variant("float32", "float32", 288, 32, 8, 3),
        pytest.param(LATENT, marks=pytest.mark.slow),
        pytest.param(replace(LATENT, dtype="float32", kv_dtype="bfloat16"), marks=pytest.mark.slow),
    ],
    ids=lambda v: v.label,
)
def test_a_threadgroup_has_the_memory_that_is_counted(v: Variant) -> None:
    with sim.recording() as recorded:
        attend(DecodeKernels(sim.metal_kernel), v, random_rows(v, [40]))
    decode = recorded.launches[0]
    assert decode.threadgroup_memory == v.geometry.threadgroup_bytes
    assert decode.threadgroups == 2 * v.geometry.threadgroups
