"""Schemas that are made of others: anyOf, allOf, oneOf, references and recursion."""

from __future__ import annotations

from support.schemas.case import Case, closed

TEXT = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


COMPOSED = (
    Case(
        "any of several types",
        {"anyOf": [{"type": "string", "maxLength": 2}, NUMBER, {"type": "null"}]},
        ("ab", 7, None, ""),
        ("abc", -1, 1000, 1.5, True, []),
    ),
    Case(
        "any of objects that share names",
        {"anyOf": [closed({"a": NUMBER, "b": TEXT}), closed({"a": TEXT}), closed({"a": NUMBER, "c": NUMBER}, "c")]},
        ({"a": 1, "b": "x"}, {"a": "x"}, {"a": 1}, {"a": 1, "c": 2}),
        ({}, {"a": "x", "b": "y"}, {"a": 1, "b": 2}, {"a": "x", "c": 1}, {"a": None}),
    ),
    Case(
        "any of, besides properties",
        {
            "type": "object",
            "properties": {"id": NUMBER, "mail": TEXT, "phone": TEXT},
            "required": ["id"],
            "additionalProperties": False,
            "anyOf": [{"required": ["mail"]}, {"required": ["phone"]}],
        },
        ({"id": 1, "mail": "a"}, {"id": 1, "phone": "b"}, {"id": 1, "mail": "a", "phone": "b"}),
        ({"id": 1}, {"mail": "a"}, {"id": 1, "fax": "c"}, {"id": 1, "mail": 1}),
    ),
    Case(
        "optional reference",
        closed(
            {"inner": {"anyOf": [_ref("Inner"), {"type": "null"}], "default": None}},
            "inner",
            **{"$defs": {"Inner": closed({"x": NUMBER})}},
        ),
        ({}, {"inner": None}, {"inner": {"x": 1}}),
        ({"inner": {}}, {"inner": 1}, {"inner": {"x": None}}, {"x": 1}),
    ),
    Case(
        "all of bounds",
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}, {"multipleOf": 3}]},
        (3, 6, 9, 12),
        (0, 4, 15, 2, "3", 4.5),
    ),
    Case(
        "all of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]},
                {"type": "object", "properties": {"b": TEXT}},
                {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]},
            ],
        },
        ({"a": 1, "c": True}, {"a": 1, "b": "x", "c": False}, {"a": 1, "b": "", "c": True}),
        ({"a": 1}, {"c": True}, {"a": 1, "b": 2, "c": True}, {"a": "1", "c": True}),
    ),
    Case(
        "all of a reference and more",
        {
            "$defs": {"base": {"type": "object", "properties": {"id": NUMBER}, "required": ["id"]}},
            "allOf": [_ref("base"), {"properties": {"id": {"maximum": 9}, "n": TEXT}, "required": ["n"]}],
        },
        ({"id": 1, "n": "x"}, {"id": 9, "n": ""}, {"id": 0, "n": "é"}),
        ({"id": 10, "n": "x"}, {"id": 1}, {"n": "x"}, {"id": 1, "n": 2}),
    ),
    Case(
        "all of text rules",
        {"allOf": [{"type": "string", "maxLength": 6}, {"minLength": 2}, {"pattern": "^[a-z]"}, {"pattern": "[0-9]$"}]},
        ("a1", "ab-1", "abcde9"),
        ("a", "1a", "A1", "abcdef9", "ab"),
    ),
    Case(
        "one of shapes by their kind",
        {
            "oneOf": [
                closed({"kind": {"const": "circle"}, "radius": {"type": "number"}}),
                closed({"kind": {"const": "square"}, "side": {"type": "number"}}),
                closed({"kind": {"enum": ["point", "dot"]}}),
            ]
        },
        ({"kind": "circle", "radius": 1}, {"kind": "square", "side": 2.5}, {"kind": "dot"}),
        (
            {"kind": "circle", "side": 1},
            {"kind": "square"},
            {"kind": "points"},
            {"radius": 1},
            {"kind": "dot", "side": 1},
        ),
    ),
    Case(
        "one of referenced events",
        {
            "type": "array",
            "items": {"oneOf": [_ref("Start"), _ref("Stop")], "discriminator": {"propertyName": "type"}},
            "maxItems": 3,
            "$defs": {
                "Start": closed({"type": {"const": "start", "type": "string"}, "at": NUMBER}),
                "Stop": closed({"type": {"const": "stop", "type": "string"}, "why": TEXT}, "why"),
            },
        },
        ([], [{"type": "start", "at": 1}], [{"type": "stop"}, {"type": "stop", "why": "x"}]),
        ([{"type": "start"}], [{"type": "stop", "at": 1}], [{"type": "pause"}], [{"at": 1}], {"type": "stop"}),
    ),
    Case(
        "one of types",
        {"oneOf": [{"type": "string", "pattern": "^[0-9]+$"}, {"type": "array", "items": NUMBER}, {"type": "boolean"}]},
        ("12", [1, 2], True, []),
        ("a", ["1"], None, 12, ""),
    ),
    Case(
        "references",
        closed(
            {"a": _ref("n"), "b": {"type": "array", "items": _ref("n")}, "c": _ref("o")},
            **{"$defs": {"n": NUMBER, "o": closed({"n": _ref("n")})}},
        ),
        ({"a": 1, "b": [], "c": {"n": 1}}, {"a": 0, "b": [1], "c": {"n": 2}}, {"a": 999, "b": [1, 2], "c": {"n": 0}}),
        (
            {"a": 1, "b": ["1"], "c": {"n": 1}},
            {"a": 1, "b": [], "c": 1},
            {"a": 1000, "b": [], "c": {"n": 1}},
            {"a": 1, "b": []},
        ),
    ),
    Case(
        "references to odd names",
        closed(
            {"a": {"$ref": "#/$defs/a~1b~0c"}, "b": {"$ref": "#/$defs/d%20e"}, "c": {"$ref": "#/properties/a"}},
            **{"$defs": {"a/b~c": NUMBER, "d e": {"type": "null"}}},
        ),
        ({"a": 1, "b": None, "c": 2}, {"a": 0, "b": None, "c": 0}, {"a": 9, "b": None, "c": 99}),
        ({"a": None, "b": None, "c": 2}, {"a": 1, "b": 1, "c": 2}, {"a": 1, "b": None, "c": None}),
    ),
    Case(
        "reference besides other words",
        {
            "$defs": {"t": {"type": "string", "minLength": 2}},
            "$ref": "#/$defs/t",
            "maxLength": 4,
            "description": "both hold",
        },
        ("ab", "abc", "abcd"),
        ("a", "abcde", 12),
    ),
    Case(
        "definitions of draft 7",
        {
            "$schema": DRAFT_7,
            "definitions": {"pos": {"type": "integer", "exclusiveMinimum": 0}},
            "type": "object",
            "properties": {"x": {"$ref": "#/definitions/pos"}, "y": {"$ref": "#/definitions/pos"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        ({"x": 1}, {"x": 1, "y": 2}, {"x": 100, "y": 1}),
        ({"x": 0}, {"y": 1}, {"x": 1, "y": -1}, {"x": 1, "z": 1}),
    ),
    Case(
        "bounds of draft 4",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "id": "https://example.org/bounds",
            "definitions": {"low": {"type": "integer", "minimum": 1, "exclusiveMinimum": True}},
            "type": "object",
            "properties": {
                "a": {"$ref": "#/definitions/low"},
                "b": {"type": "number", "maximum": 5, "exclusiveMaximum": False},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        ({"a": 2, "b": 5}, {"a": 3, "b": -1}, {"a": 10, "b": 4.5}),
        ({"a": 1, "b": 5}, {"a": 2, "b": 5.5}, {"a": 2}, {"a": 0, "b": 0}),
    ),
    Case(
        "references by anchors and ids",
        {
            "$id": "https://example.org/whole",
            "$defs": {"here": {"$anchor": "here", **NUMBER}, "part": {"$id": "part.json", **TEXT}},
            "type": "object",
            "properties": {"a": {"$ref": "#here"}, "b": {"$ref": "part.json"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        ({"a": 1, "b": ""}, {"a": 0, "b": "x"}, {"a": 999, "b": "é"}),
        ({"a": "x", "b": ""}, {"a": 1, "b": 1}, {"a": 1000, "b": ""}, {"a": 1}),
    ),
    Case(
        "tuple of draft 7",
        {
            "$schema": DRAFT_7,
            "type": "array",
            "items": [TEXT, NUMBER],
            "additionalItems": {"type": "null"},
            "minItems": 1,
        },
        (["a"], ["a", 1], ["a", 1, None, None]),
        ([], [1], ["a", "b"], ["a", 1, 2]),
    ),
    Case(
        "tree",
        {
            "$defs": {
                "node": closed(
                    {"value": NUMBER, "children": {"type": "array", "items": _ref("node"), "maxItems": 2}}, "children"
                )
            },
            "$ref": "#/$defs/node",
        },
        (
            {"value": 1},
            {"value": 1, "children": []},
            {"value": 1, "children": [{"value": 2}, {"value": 3, "children": [{"value": 4}]}]},
        ),
        (
            {},
            {"value": 1, "children": [1]},
            {"value": 1, "children": [{"children": []}]},
            {"value": 1, "children": [{"value": 1}] * 3},
        ),
    ),
    Case(
        "linked list",
        closed({"head": TEXT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        (
            {"head": "a", "next": None},
            {"head": "a", "next": {"head": "b", "next": None}},
            {"head": "", "next": {"head": "", "next": {"head": "", "next": None}}},
        ),
        ({"head": "a"}, {"head": "a", "next": {}}, {"head": "a", "next": {"head": "b"}}, {"next": None}, None),
    ),
    Case(
        "expression",
        {
            "$ref": "#/$defs/expression",
            "$defs": {
                "expression": {"anyOf": [{"type": "number"}, _ref("sum"), _ref("product")]},
                "sum": closed({"add": _ref("terms")}),
                "product": closed({"mul": _ref("terms")}),
                "terms": {"type": "array", "items": _ref("expression"), "minItems": 2, "maxItems": 2},
            },
        },
        (1, {"add": [1, 2]}, {"mul": [{"add": [1, 2.5]}, {"mul": [3, 4]}]}),
        ("1", {"add": [1]}, {"sub": [1, 2]}, {"add": [1, {"mul": []}]}, {"add": [1, 2], "mul": [1, 2]}),
    ),
    Case(
        "schemas that are true and false",
        {
            "type": "object",
            "properties": {"any": True, "none": False, "n": NUMBER},
            "required": ["any"],
            "additionalProperties": False,
        },
        ({"any": None}, {"any": [1], "n": 1}, {"any": {"none": 1}}),
        ({"any": 1, "none": 1}, {"n": 1}, {"any": 1, "n": None}),
    ),
)
