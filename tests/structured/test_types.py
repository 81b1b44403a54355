"""Schemas of types: closed, in the types' own order, and refused in one line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cortexmlx.structured.schemas import adapter_of, closed_schema_of


@dataclass
class Inner:
    properties: dict[str, int]
    enum: str


@dataclass
class Outer:
    inner: list[Inner]
    default: Inner | None = None


def test_every_object_with_named_properties_is_closed() -> None:
    """Also where properties are called like keywords, whose values are no schemas."""
    schema = closed_schema_of(Outer)
    assert isinstance(schema, dict)
    inner = schema["$defs"]["Inner"]
    assert schema["additionalProperties"] is False and inner["additionalProperties"] is False
    assert list(schema["properties"]) == ["inner", "default"]
    assert inner["properties"]["properties"]["additionalProperties"] == {"type": "integer"}
    assert adapter_of(Outer).validate_json('{"inner": []}') == Outer([])


@pytest.mark.parametrize("kind", [print, object(), open, 5])
def test_what_has_no_schema_is_refused_in_one_line(kind: object) -> None:
    with pytest.raises(ValueError) as refused:
        closed_schema_of(kind)
    assert str(refused.value) and "\n" not in str(refused.value)
