"""Schemas of objects and arrays."""

from __future__ import annotations

from typing import Any

from support.schemas.case import Case, closed

TEXT = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
DEPTH = 50


def _deep_schema(of: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        of = closed({"in": of})
    return of


def _deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {"in": value}
    return value


def _lists(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _list_schema(of: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        of = {"type": "array", "items": of, "minItems": 1, "maxItems": 1}
    return of


PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "birthday": {"type": "string", "format": "date"},
        "address": closed(
            {"street": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "country": {"enum": ["DE", "FR"]}},
            "country",
        ),
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "address"],
    "additionalProperties": False,
}
_HOME = {"street": "Rue 1", "zip": "01234"}

OBJECTS = (
    Case(
        "required and optional properties",
        closed({"a": NUMBER, "b": TEXT, "c": {"type": "boolean"}, "d": {"type": "null"}}, "a", "c"),
        ({"b": "x", "d": None}, {"a": 1, "b": "x", "d": None}, {"a": 1, "b": "", "c": True, "d": None}),
        (
            {},
            {"a": 1, "b": "x"},
            {"b": "x", "d": None, "e": 1},
            {"a": "1", "b": "x", "d": None},
            {"b": None, "d": None},
        ),
    ),
    Case(
        "optional properties only",
        closed({"a": NUMBER, "b": NUMBER, "c": NUMBER}, "a", "b", "c"),
        ({}, {"b": 2}, {"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}),
        ({"d": 1}, {"a": 1000}, {"a": None}, [], None),
    ),
    Case(
        "other properties are allowed",
        {"type": "object", "properties": {"id": NUMBER}, "required": ["id"], "additionalProperties": True},
        ({"id": 1}, {"id": 1, "x": [None]}, {"id": 1, "idx": {"y": 2}, "": "z"}),
        ({}, {"x": 1}, {"id": "1", "x": 1}, {"id": -1}),
    ),
    Case(
        "other properties have a schema",
        {"type": "object", "properties": {"id": NUMBER}, "additionalProperties": {"type": "boolean"}},
        ({}, {"id": 1}, {"x": True}, {"id": 2, "i": True, "idd": False}),
        ({"id": True}, {"x": 1}, {"id": 1, "i": 2}, {"id": 1, "idd": None}),
    ),
    Case(
        "mapping to numbers",
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}},
        ({}, {"a": 0.5}, {"a": 0, 'b "c"': 1, "é": 0.25}),
        ({"a": 2}, {"a": "0"}, {"a": 0.5, "b": -0.5}, [0.5]),
    ),
    Case(
        "mapping with names of a pattern",
        {
            "type": "object",
            "patternProperties": {"^[a-z]+_id$": NUMBER, "^is-": {"type": "boolean"}},
            "additionalProperties": False,
        },
        ({}, {"user_id": 5}, {"is-new": True, "a_id": 1, "b_id": 2}),
        ({"user_id": "5"}, {"user": 5}, {"is-new": 1}, {"User_id": 5}, {"_id": 1}),
    ),
    Case(
        "patterns besides properties",
        {
            "type": "object",
            "properties": {"name": TEXT},
            "required": ["name"],
            "patternProperties": {"^x-": NUMBER},
            "additionalProperties": {"type": "null"},
        },
        ({"name": "a"}, {"name": "a", "x-b": 1}, {"name": "a", "x-b": 1, "other": None}),
        ({"x-b": 1}, {"name": "a", "x-b": None}, {"name": "a", "other": 1}, {"name": None}),
    ),
    Case(
        "required name without a schema",
        {"type": "object", "properties": {"a": NUMBER}, "required": ["a", "b"], "additionalProperties": TEXT},
        ({"a": 1, "b": "x"}, {"a": 0, "b": ""}, {"a": 1, "b": "x", "c": "y"}),
        ({"a": 1}, {"a": 1, "b": 2}, {"b": "x"}, {"a": 1, "c": "y"}),
    ),
    Case(
        "number of properties",
        {"type": "object", "additionalProperties": NUMBER, "minProperties": 1, "maxProperties": 3},
        ({"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}),
        ({}, {"a": 1, "b": 2, "c": 3, "d": 4}, {"a": "1"}),
    ),
    Case(
        "empty objects",
        {"type": "array", "items": closed({}), "maxItems": 2},
        ([], [{}], [{}, {}]),
        ([{"a": 1}], [[]], [{}, {}, {}], {}),
    ),
    Case(
        "empty arrays",
        closed({"a": {"type": "array", "maxItems": 0}, "b": {"type": "array", "items": False}}, "a", "b"),
        ({}, {"a": []}, {"a": [], "b": []}),
        ({"a": [1]}, {"b": [None]}, {"a": {}}),
    ),
    Case(
        "names that begin other names",
        closed({"a": NUMBER, "ab": TEXT, "abc": NUMBER, "abcd": {"type": "boolean"}}, "a", "ab", "abc"),
        (
            {"abcd": True},
            {"a": 1, "abcd": True},
            {"ab": "", "abc": 2, "abcd": False},
            {"a": 1, "ab": "x", "abc": 2, "abcd": True},
        ),
        ({"a": 1}, {"abcde": True}, {"a": "x", "abcd": True}, {"ab": 1, "abcd": True}, {"abc": True, "abcd": True}),
    ),
    Case(
        "unicode names",
        closed(
            {"größe": NUMBER, "名前": TEXT, "🙂": {"enum": ["✓", "✗"]}, "a\u0301": {"type": "null"}}, "🙂", "a\u0301"
        ),
        (
            {"größe": 1, "名前": "漢字"},
            {"größe": 1, "名前": "", "🙂": "✗"},
            {"größe": 1, "名前": "é", "🙂": "✓", "a\u0301": None},
        ),
        (
            {"grösse": 1, "名前": ""},
            {"größe": 1},
            {"größe": 1, "名前": "", "🙂": "x"},
            {"größe": 1, "名前": "", "á": None},
        ),
    ),
    Case(
        "names with quotes and blanks",
        closed(
            {'a "b"': NUMBER, "c\\d": NUMBER, "e\nf\tg": NUMBER, "": NUMBER, " ": NUMBER, "/~{}[],:": NUMBER},
            "c\\d",
            " ",
        ),
        (
            {'a "b"': 1, "e\nf\tg": 2, "": 3, "/~{}[],:": 4},
            {'a "b"': 1, "c\\d": 2, "e\nf\tg": 3, "": 4, "/~{}[],:": 5},
            {'a "b"': 1, "c\\d": 2, "e\nf\tg": 3, "": 4, " ": 5, "/~{}[],:": 6},
        ),
        (
            {"a b": 1, "e\nf\tg": 2, "": 3, "/~{}[],:": 4},
            {'a "b"': 1, "e\nf\tg": 2, "/~{}[],:": 4},
            {'a "b"': 1, "cd": 1, "e\nf\tg": 2, "": 3, "/~{}[],:": 4},
            {'a "b"': 1, "e f g": 2, "": 3, "/~{}[],:": 4},
        ),
    ),
    Case(
        "person",
        PERSON,
        (
            {"name": "A", "address": _HOME},
            {"name": "B", "birthday": "2000-01-31", "address": {**_HOME, "country": "FR"}},
            {"name": "É", "address": _HOME, "tags": ["a", "", "12345678"]},
        ),
        (
            {"name": "A"},
            {"name": "", "address": _HOME},
            {"name": "A", "address": {"street": "Rue 1", "zip": "1234"}},
            {"name": "A", "birthday": "31.1.2000", "address": _HOME},
            {"name": "A", "address": {**_HOME, "country": "IT"}},
            {"name": "A", "address": _HOME, "tags": ["123456789"]},
            {"name": "A", "address": _HOME, "tags": ["a"] * 4},
        ),
    ),
    Case(
        "deep objects",
        _deep_schema(NUMBER, DEPTH),
        (_deep(0, DEPTH), _deep(7, DEPTH), _deep(999, DEPTH)),
        (_deep(1, DEPTH - 1), _deep(1, DEPTH + 1), _deep("1", DEPTH), _deep({}, DEPTH - 1), 1),
    ),
    Case(
        "deep arrays",
        _list_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, DEPTH - 1),
        (_lists(True, DEPTH), _lists(False, DEPTH), _lists([True, False], DEPTH - 1)),
        (_lists(True, DEPTH - 1), _lists(True, DEPTH + 1), _lists([True] * 3, DEPTH - 1), []),
    ),
    Case(
        "words about a schema",
        {
            "$id": "https://example.org/a.json",
            "$comment": "none of these words changes what fits",
            "title": "T",
            "description": 'With "quotes"',
            "default": {"a": "x"},
            "examples": [{"a": "no number"}],
            "type": "object",
            "properties": {
                "a": {
                    "type": "integer",
                    "title": "string",
                    "description": "null",
                    "default": "x",
                    "examples": ["y"],
                    "deprecated": True,
                    "readOnly": True,
                }
            },
            "required": ["a"],
            "additionalProperties": False,
        },
        ({"a": 1}, {"a": 0}, {"a": -12}),
        ({"a": "x"}, {"a": "y"}, {}, {"a": 1, "title": "T"}),
    ),
    Case(
        "array with items",
        {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 4},
        ([1, 2], [1, 2, 3], [0, 0, 0, 999]),
        ([], [1], [1, 2, 3, 4, 5], [1, "2"], [1, 1000], {"0": 1}),
    ),
    Case(
        "array that is not empty",
        {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1},
        (["a"], ["b", "a"], ["a"] * 20),
        ([], ["c"], ["a", None], "a"),
    ),
    Case(
        "tuple",
        {"type": "array", "prefixItems": [TEXT, NUMBER, {"type": "boolean"}], "items": False, "minItems": 2},
        (["a", 1], ["", 0, True], ["b", 999, False]),
        ([], ["a"], [1, "a"], ["a", 1, None], ["a", 1, True, 1]),
    ),
    Case(
        "tuple with more items",
        {"type": "array", "prefixItems": [{"const": "sum"}], "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
        (["sum"], ["sum", 1], ["sum", 1, 2.5, -3]),
        ([], ["Sum"], ["sum", "1"], ["sum", 1, 2, 3, 4], [1]),
    ),
    Case(
        "matrix",
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "minItems": 1,
            "maxItems": 3,
        },
        ([[1, 2]], [[0, 0.5], [1, 1]], [[1, 2], [3, 4], [5, 6]]),
        ([], [[1]], [[1, 2, 3]], [1, 2], [[1, 2], []], [[1, "2"]]),
    ),
)
