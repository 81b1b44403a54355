"""Which escapes JSON may have: all of them, unless they would be another spelling of a property."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.structured.schemas import PLAIN, allowed_escapes

A: dict[str, Any] = {"properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        A,
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "null"}},
        {"patternProperties": {"^a": {}}},
        {"type": "array", "items": [{"anyOf": [{"type": "null"}, A]}]},
        {"$defs": {"x": A}, "$ref": "#/$defs/x"},
        {**A, "additionalProperties": False, "allOf": [A]},
        {**A, "description": "Größe\n\t漢字"},
    ],
)
def test_beside_other_properties_each_has_its_plain_name(schema: dict[str, Any]) -> None:
    assert allowed_escapes(schema) == PLAIN


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"type": "object"},
        {"properties": {}},
        {"additionalProperties": A["properties"]["a"]},
        {**A, "additionalProperties": False},
        {**A, "required": ["\x1b"]},
        {"properties": {"a": {"const": "\u007f"}}},
        {"properties": {"a": {"type": "string", "pattern": r"^[\u0001-\u001f]$"}}},
        {"properties": {"a": {"type": "string", "pattern": r"^\x1B"}}},
    ],
)
def test_otherwise_control_characters_can_be_written(schema: Any) -> None:
    assert allowed_escapes(schema) is None
