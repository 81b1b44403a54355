"""Closed schemas: every object that names its properties has no others, and what fits them fits the original."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cortexmlx.structured.schemas import close, close_plain_objects, close_where_safe

A = {"properties": {"a": {}}}
B = {"properties": {"b": {}}}
TAGGED = [
    {"type": "object", "properties": {"tag": {"const": tag}, tag: {}}, "required": ["tag"]} for tag in ("one", "two")
]


def shut(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**schema, **more, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, shut(A)),
        ({"items": A, "$defs": {"x": B}}, {"items": shut(A), "$defs": {"x": shut(B)}}),
        ({"properties": {"properties": A}}, shut({"properties": {"properties": shut(A)}})),
        ({"patternProperties": {"^x": A}}, shut({"patternProperties": {"^x": shut(A)}})),
        ({"anyOf": [A, B, {"type": "null"}]}, {"anyOf": [shut(A), shut(B), {"type": "null"}]}),
        ({"allOf": [A], "title": "x"}, {"allOf": [shut(A)], "title": "x"}),
        ({**A, "anyOf": [{"required": ["a"]}]}, shut({**A, "anyOf": [{"required": ["a"]}]})),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": shut(A)}}),
        ({"oneOf": TAGGED}, {"oneOf": [shut(each) for each in TAGGED]}),
        (
            {"oneOf": [{"type": "object", **A}, {"type": ["null", "string"]}]},
            {"oneOf": [shut({"type": "object"}, **A), {"type": ["null", "string"]}]},
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}], "$defs": dict(zip("01", TAGGED, strict=True))},
            {
                "oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}],
                "$defs": dict(zip("01", map(shut, TAGGED), strict=True)),
            },
        ),
    ],
)
def test_an_object_that_names_its_properties_is_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert close_where_safe(schema) == closed


def test_a_plain_object_says_nothing_but_its_properties() -> None:
    for more in ({"anyOf": [{"required": ["a"]}]}, {"patternProperties": {"^x": {}}}, {"not": {}}, {"if": {}}):
        assert close_plain_objects({"items": {**A, **more}}) == {"items": {**A, **more}}
    for said in ({"patternProperties": {"^x": A}}, {**A, "additionalProperties": True}, True):
        closed = {"patternProperties": {"^x": shut(A)}} if "patternProperties" in str(said) else said
        assert close_plain_objects(said) == closed
    assert close_plain_objects({"anyOf": [A, B]}) == {"anyOf": [shut(A), shut(B)]}
    assert close_plain_objects({"properties": {"patternProperties": A}}) == shut(
        {"properties": {"patternProperties": shut(A)}}
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"default": A, "const": A, "enum": [A], "examples": [A]},
        {"not": A},
        {"if": A, "then": B},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": False},
        {**A, "required": ["a", "b"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {"allOf": [{"properties": {}}, A]},
        {"allOf": [{"$ref": "#/$defs/x"}, B], "$defs": {"x": A}},
        {"allOf": [{"$ref": "#/$defs/x/allOf/0"}, B], "$defs": {"x": {"allOf": [A]}}},
        {**A, "anyOf": [B, {"required": ["a"]}]},
        {"required": ["a"], "anyOf": [A, B]},
        {"anyOf": [A, B], "oneOf": [B]},
        {**A, "$ref": "#/$defs/x", "$defs": {"x": B}},
        {**A, "allOf": [{"patternProperties": {"^x": {}}}]},
        {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]},
        {"oneOf": [{"properties": {"a": A}}, {"properties": {"a": {"$ref": "#/$defs/x"}}}], "$defs": {"x": B}},
    ],
)
def test_what_would_forbid_a_named_property_stays_open(schema: dict[str, Any]) -> None:
    assert close_where_safe(schema) == schema


@pytest.mark.parametrize("schema", [True, False, {"$ref": "#/x"}, {"$ref": "http://x/y", "allOf": 5, "required": "a"}])
def test_what_is_no_object_or_wrong_is_left_to_the_compiler(schema: Any) -> None:
    assert close_where_safe(schema) == schema


def test_all_objects_of_a_type_are_closed() -> None:
    assert close({"allOf": [A, B]}) == {"allOf": [shut(A), shut(B)]}


names = st.sampled_from("ab")
values = st.sampled_from([True, {"type": "string"}, {"const": "x"}, {"properties": {"a": {}}}, {"$ref": "#/$defs/d"}])
flat = st.fixed_dictionaries(
    {"properties": st.dictionaries(names, values, max_size=2)},
    optional={"type": st.just("object"), "required": st.lists(names, max_size=1), "minProperties": st.just(1)},
)
parts = flat | st.just({"$ref": "#/$defs/d"}) | st.just({"required": ["a"]}) | st.just({"type": "string"})
joined = st.tuples(st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(parts, min_size=1, max_size=2)).map(
    lambda pair: dict([pair])
)
schemas = st.builds(
    lambda *some: {k: v for each in some for k, v in each.items()}, joined, joined | st.just({}), flat | st.just({})
)
documents = st.dictionaries(names, st.sampled_from([1, "x", {"a": 1}, {"b": 1}]), max_size=2)


targets = st.sampled_from([A, {**B, "required": ["b"]}, {"type": "string"}, {"allOf": [A, B]}, {"oneOf": [A, B]}])


@given(schema=schemas, target=targets, document=documents)
def test_what_fits_a_closed_schema_fits_the_original(schema: Any, target: Any, document: Any) -> None:
    """jsonschema is the judge."""
    whole = {**schema, "$defs": {"d": target}}
    if Draft202012Validator(close_where_safe(whole)).is_valid(document):
        Draft202012Validator(whole).validate(document)
