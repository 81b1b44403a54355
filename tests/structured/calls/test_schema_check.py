"""The check of arguments agrees with jsonschema, and its work is bounded whatever the schema and the value are."""

from __future__ import annotations

from typing import Any

import jsonschema

from cortexmlx.structured.calls import format as schema_check
from cortexmlx.structured.calls.format import find_misfit

NODE: dict[str, Any] = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]}

SCHEMAS: tuple[dict[str, Any], ...] = (
    *({}, {"type": "string"}, {"type": ["integer", "null"]}, {"enum": [1, "a", True, None]}, {"const": 1}),
    *({"minimum": 2}, {"exclusiveMaximum": 2}, {"minLength": 2}, {"maxItems": 1}, {"type": "integer", "maximum": 5}),
    {"properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    {"additionalProperties": {"type": "integer"}, "properties": {"a": True}},
    {"items": {"type": "integer"}},
    {"prefixItems": [{"type": "string"}], "items": False},
    {"allOf": [{"type": "integer"}, {"minimum": 1}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/node"},
)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 2.0, 2.5, 7, "", "a", "bc", [], [1], ["a"], ["a", 1], [1, [2, []]], [["x"]]),
    *({}, {"a": "x"}, {"a": 1}, {"a": "x", "b": 1}, {"b": "x"}),
)


def test_it_agrees_with_jsonschema() -> None:
    for schema in SCHEMAS:
        whole = {**schema, "$defs": {"node": NODE}}
        judge = jsonschema.Draft202012Validator(whole)
        for value in VALUES:
            assert (not find_misfit(value, whole)) == judge.is_valid(value), (schema, value)


def test_a_schema_of_a_stranger_costs_no_more_than_the_bound() -> None:
    ways = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/node"}}] * 8}
    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    check = schema_check._SchemaCheck({"$ref": "#/$defs/node", "$defs": {"node": ways}})
    check.find_misfit(deep, {"$ref": "#/$defs/node"}, "it")
    assert check._steps <= schema_check.MAX_STEPS + 1000
    circle = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    assert find_misfit(deep, circle) == "" and find_misfit("x", {"$ref": "#/nowhere"}) == ""
