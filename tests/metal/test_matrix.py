"""Which shapes the matrix kernel serves, and how a shape fills its threadgroup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cortexmlx.metal.matrix import MatrixGeometry
from cortexmlx.metal.rules import Variant, refusal
from cortexmlx.metal.shape import DTYPES, Kernel


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 112, 120, 128, 192, 256])
def test_up_to_sixteen_query_heads_may_meet_their_keys_as_matrices(dim: int, group: int) -> None:
    for dtype in DTYPES if dim < 256 else DTYPES[1:]:
        v = Variant(dtype, dtype, dim, dim, 32, group, forced_kernel=Kernel.MATRIX)
        g = v.geometry
        assert MatrixGeometry.refusal(v) is None and refusal(v) is None
        assert v.label.endswith(", matrix kernel")
        assert 8 * g.tiles >= group > 8 * (g.tiles - 1)
        assert v.value_dim // g.parts <= 128 and g.threads == 32 * g.slices == 128
        assert g.threadgroups == g.tiles * g.parts


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": 17}, "at most two tiles"),
        ({"query_tokens": 3}, "at most two tiles"),
        ({"key_dim": 68}, "matrices of 8 rows"),
        ({"value_dim": 100}, "matrices of 8 rows"),
        ({"value_dim": 136}, "matrices of 8 rows"),
        ({"block_size": 4}, "matrices of 8 rows"),
        ({"key_dim": 56}, "below 64"),
        ({"dtype": "float32", "key_dim": 200}, "192 in float32"),
    ],
)
def test_what_the_vector_kernel_serves_instead_says_why(change: dict[str, Any], says: str) -> None:
    matrix = Variant("float16", "float16", 128, 128, 32, 8)
    assert matrix.kernel is Kernel.MATRIX
    v = replace(matrix, **change)
    assert v.kernel is Kernel.VECTOR and says in str(MatrixGeometry.refusal(v)) and "matrix kernel" not in v.label
    assert replace(matrix, forced_kernel=Kernel.VECTOR).kernel is Kernel.VECTOR
    assert replace(matrix, group=1, query_tokens=2).kernel is Kernel.MATRIX


def test_every_rule_for_the_matrix_kernel_has_a_shape_that_breaks_it_alone() -> None:
    halves: dict[str, Any] = {"kv_bits": 8, "quant_group": 64, "value_dim": 192}
    broken: list[dict[str, Any]] = [{"latent": True}, {"group": 17}, {"key_dim": 68}, {"value_dim": 48}, halves]
    for rule, change in zip(MatrixGeometry.rules, broken, strict=True):
        v = replace(Variant("float16", "float16", 128, 128, 32, 4), **change)
        assert [r for r in MatrixGeometry.rules if not r.holds(v)] == [rule]
