"""`multipleOf` is bounded by what it costs to compile."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.structured.schemas import check_multiples


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"multipleOf": 0.01},
        {"multipleOf": 10**30},
        {"multipleOf": "7"},
        {"multipleOf": True},
        {"multipleOf": 0},
        {"multipleOf": float("inf")},
        {"multipleOf": 99_991},
        {"properties": {f"p{i}": {"multipleOf": (0.01, 0.5, 5, 15, 60, 1000)[i % 6]} for i in range(60)}},
    ],
)
def test_what_is_cheap_is_let_through(schema: Any) -> None:
    check_multiples(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 999_983},
        {"multipleOf": 0.999983},
        {"multipleOf": -999_983},
        {"multipleOf": 2**4000 + 1},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 991}], "$defs": {"a": {"multipleOf": 997}}},
        {"properties": {f"p{i}": {"multipleOf": 9973, "minimum": i} for i in range(20)}},
        {"$defs": {"a": {"multipleOf": 9973}}, "anyOf": [{"allOf": [{"$ref": "#/$defs/a"}]} for _ in range(20)]},
    ],
)
def test_what_takes_long_is_refused_with_its_numbers(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"least common multiple .* must be at most 100,000") as refused:
        StructuredOutput.json(schema)
    assert len(str(refused.value)) < 2000
