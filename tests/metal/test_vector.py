"""Which shapes the vector kernel serves, and how a shape fills its threadgroup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.metal.shape import DTYPES, AttentionShape
from cortexmlx.metal.vector import REGISTERS, VectorGeometry, lane_numbers

SHAPE = AttentionShape("float16", "float16", 128, 128, 32, 4)
DIMS = st.integers(2, 64).map(lambda n: 4 * n)


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), DIMS, DIMS, st.integers(1, 100))
def test_a_thread_holds_what_its_registers_take(
    dtype: str, kv_dtype: str, key_dim: int, value_dim: int, group: int
) -> None:
    v = VectorGeometry(AttentionShape(dtype, kv_dtype, key_dim, value_dim, 32, group))
    query, token = ({"float32": 4, "float16": 2, "bfloat16": 4}[t] for t in (dtype, kv_dtype))  # in a register
    key, value = lane_numbers(key_dim), lane_numbers(value_dim)
    assert v.tile * (key * query + (value + 1) * 4) + v.tokens_ahead * max(key, value) * token <= 4 * REGISTERS
    assert v.tile in (1, 2, 4, 8) and v.tokens_ahead in (2, 4, 8) and v.tile * v.tokens_ahead <= 32, (
        "sums that 32 lanes can have"
    )
    assert v.tile * v.tiles >= group > v.tile * (v.tiles - 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_dim": 18}, "a multiple of 4"),
        ({"value_dim": 130}, "a multiple of 4"),
        ({"key_dim": 4}, "between 8 and 256"),
        ({"value_dim": 260}, "between 8 and 256"),
        ({"query_tokens": 5}, "several query tokens"),
    ],
)
def test_what_it_does_not_serve_says_why(change: dict[str, Any], says: str) -> None:
    assert VectorGeometry.refusal(SHAPE) is None
    assert says in str(VectorGeometry.refusal(replace(SHAPE, **change)))
