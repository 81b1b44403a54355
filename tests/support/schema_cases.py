"""Schemas with documents that fit them and documents that do not, and the judge of documents: the package jsonschema,
with patterns of Unicode and with every format.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import regex
from jsonschema.validators import extend, validator_for


class Case(NamedTuple):
    """`valid` documents have their properties in the order of the schema, as an answer has them."""

    name: str
    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def closed(properties: dict[str, Any], *optional: str, **keywords: Any) -> dict[str, Any]:
    """An object with these properties only. All of them are required but the `optional` ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **keywords,
    }


TEXT = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def _of(format: str, valid: tuple[str, ...], invalid: tuple[Any, ...]) -> Case:
    return Case(f"format {format}", {"type": "string", "format": format}, valid, invalid)


FORMAT_CASES = (
    _of("date", ("2024-02-29", "1999-12-31", "0001-01-01"), ("2024-13-01", "2024-1-01", "2024-01-32", "24-01-01", "")),
    _of(
        "time", ("10:20:30Z", "23:59:59.123+02:00", "00:00:00-00:30"), ("10:20:30", "24:00:00Z", "10:60:00Z", "10:20Z")
    ),
    _of(
        "date-time",
        ("2024-02-29T10:20:30Z", "1999-12-31T23:59:59.5-08:00", "2026-01-01T00:00:00.000001+00:00"),
        ("2024-02-29", "2024-02-29T10:20:30", "2024-02-29 T10:20:30Z", "2024-00-10T10:20:30Z"),
    ),
    _of("duration", ("P3D", "PT5M30S", "P1Y2M10DT2H", "P4W"), ("P", "PT", "3D", "P1S", "P1.5D")),
    _of(
        "email",
        ("a@b.example", "first.last+tag@sub.domain.org", "x_y-z@a1.io"),
        ("a", "a@", "@b.c", "a b@c.d", "a@b@c.d"),
    ),
    _of("hostname", ("example.org", "a-1.b", "x"), ("", "-a.b", "a_b.c", "a b", "é.org")),
    _of("ipv4", ("127.0.0.1", "255.255.255.255", "8.8.4.4"), ("256.0.0.1", "1.2.3", "1.2.3.4.5", "01.2.3.4")),
    _of(
        "ipv6",
        ("::1", "2001:db8::8a2e:370:7334", "fe80:0:0:0:1:2:3:4", "::"),
        (":::1", "1:2:3", "12345::", "g::1", "1.2.3.4"),
    ),
    _of(
        "uuid",
        (
            "123e4567-e89b-12d3-a456-426614174000",
            "00000000-0000-0000-0000-000000000000",
            "A23E4567-E89B-12D3-A456-42661417400F",
        ),
        (
            "123e4567e89b12d3a456426614174000",
            "123e4567-e89b-12d3-a456-42661417400g",
            "123e4567-e89b-12d3-a456-42661417400",
        ),
    ),
    _of(
        "uri",
        ("https://example.org/a?b=c#d", "mailto:a@b.c", "urn:isbn:0451450523"),
        ("example.org/a", "//a/b", "http://a b", ""),
    ),
)

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_PART = r"(?:[\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"

GRAMMARS = {
    "time": _TIME,
    "duration": r"P(?!$)(?:\d+W|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?)",
    "email": rf"(?:{_ATOM}(?:\.{_ATOM})*|\"(?:[ !#-\[\]-~]|\\[ -~])*\")@(?:{_LABEL}(?:\.{_LABEL})*|\[[^\[\]\\ ]+\])",
    "hostname": rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://[^/?#\s\"<>\\^`{{|}}]*)?(?:{_PART}|/)*(?:\?(?:{_PART}|[/?])*)?"
    rf"(?:#(?:{_PART}|[/?])*)?",
}
"""The grammars of RFC 3339, 5321, 1123, 4122 and 3986 as regular expressions of ASCII."""


def fits(format: str, text: str) -> bool:
    """Whether a text has a format."""
    if format == "date-time":
        day, _, time = text[:10], text[10:11], text[11:]
        return text[10:11] in tuple("Tt") and fits("date", day) and fits("time", time)
    try:
        if format == "date":
            return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) and datetime.date.fromisoformat(text))
        if format == "ipv4":
            return bool(ipaddress.IPv4Address(text))
        if format == "ipv6":
            return ipaddress.IPv6Address(text) is not None and "%" not in text
    except ValueError:
        return False
    return re.fullmatch(GRAMMARS[format], text, re.ASCII) is not None


FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_checker = jsonschema.FormatChecker(formats=())
for _format in FORMATS:
    _checker.checks(_format)(lambda value, format=_format: not isinstance(value, str) or fits(format, value))


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Python's own expressions know no classes of Unicode."""
    if isinstance(value, str) and not regex.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def judge_of(schema: dict[str, Any]) -> Any:
    """The validator of a schema. Without `$schema`, it is that of draft 2020-12."""
    kind = validator_for(schema, jsonschema.Draft202012Validator)
    kind.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    return extend(kind, {"pattern": _pattern})(schema, format_checker=_checker)


LARGE = [f"item-{number:03}" for number in range(300)]

VALUES = (
    Case(
        "null", {"type": "array", "items": {"type": "null"}}, ([], [None], [None] * 3), (None, [0], [False], ["null"])
    ),
    Case(
        "boolean",
        closed({"yes": {"type": "boolean"}, "no": {"type": "boolean"}}, "no"),
        ({"yes": True}, {"yes": False}, {"yes": True, "no": False}),
        ({"yes": 1}, {"yes": "true"}, {"yes": None}, {"no": True}),
    ),
    Case(
        "integer between two bounds",
        {"type": "integer", "minimum": -5, "maximum": 120},
        (-5, 0, 7, 99, 120),
        (-6, 121, 1000, -50, 1.5, "5", None),
    ),
    Case(
        "integer between exclusive bounds",
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        (1, 5, 9),
        (0, 10, -1, 11, 5.5),
    ),
    Case(
        "large integers",
        {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
        (0, 2**53 - 1, -(2**53) + 1, 2**31),
        (2**53, -(2**53), 2**64, "0"),
    ),
    Case("multiple of 5", {"type": "integer", "multipleOf": 5}, (0, 5, -10, 12345), (1, 12, -6, 5.5)),
    Case(
        "multiple of a quarter",
        {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 100},
        (0, 0.25, 3, 99.75),
        (0.3, 0.125, 99.9, -0.25),
    ),
    Case(
        "number between exclusive bounds",
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        (0.5, 0.001, 0.999),
        (0, 1, 0.0, 1.0, -0.5, 1.5),
    ),
    Case("number", {"type": "number"}, (0, -1, 1.25, 1e30, -2.5e-7), ("1", None, True, [1])),
    Case("nullable text", {"type": ["string", "null"], "maxLength": 5}, (None, "", "null", "12345"), (0, "123456", [])),
    Case(
        "no type", closed({"any": {}}), ({"any": None}, {"any": [{}, 1.5]}, {"any": {"b": "c"}}), ({}, {"ani": 1}, [])
    ),
    Case(
        "text of bounded length",
        {"type": "string", "minLength": 2, "maxLength": 5},
        ("ab", "é🙂", "漢字漢字漢", 'a"\\\n\t'),
        ("", "a", "🙂", "abcdef", "漢字漢字漢字", 12),
    ),
    Case(
        "pattern with anchors",
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        ("AB-123", "ZZ-000", "QX-999"),
        ("AB-12", "AB-1234", "Ab-123", " AB-123"),
    ),
    Case(
        "pattern without anchors",
        {"type": "string", "pattern": "c[ao]t"},
        ("cat", "a cot.", 'the "cat"\n'),
        ("", "cut", "c at", "CAT"),
    ),
    Case(
        "pattern of letters of any script",
        {"type": "string", "pattern": r"^\p{Lu}\p{Ll}+( \p{Lu}\p{Ll}+)?$"},
        ("Élodie", "Ωmega Ärger", "Иван Петров"),
        ("élodie", "E", "Élodie  X", "漢字", "Ab C", "Ab1"),
    ),
    Case(
        "pattern with classes and escapes",
        {"type": "string", "pattern": r"^(\+|00)[1-9]\d{0,2}[ ./\-]?\d{3,10}$"},
        ("+49 12345", "0033123", "+1.555"),
        ("49 12345", "+0 12345", "+49  12345", "+49 12"),
    ),
    Case(
        "pattern and length",
        {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 4},
        ("aa", "bab", "abab"),
        ("a", "ababa", "abc"),
    ),
    Case(
        "list of values of every type",
        {"enum": [1, "1", 2.5, True, None, [], [1, "a"], {}, {"a": {"b": None}}]},
        (1, "1", 2.5, True, None, [], [1, "a"], {}, {"a": {"b": None}}),
        (2, "2", False, "true", [1], ["a", 1], {"a": 1}, {"a": {}}, 2.55),
    ),
    Case("large list", {"enum": LARGE}, (LARGE[0], LARGE[99], LARGE[-1]), ("item-300", "item-1", "item-0000", "item-")),
    Case(
        "constants",
        closed(
            {
                "zero": {"const": 0},
                "false": {"const": False},
                "null": {"const": None},
                "text": {"const": ""},
                "list": {"const": [1, [2]]},
                "object": {"const": {"k": [], "l": "m"}},
            },
            "zero",
            "false",
            "null",
            "text",
            "list",
            "object",
        ),
        (
            {},
            {"zero": 0, "false": False, "null": None, "text": "", "list": [1, [2]], "object": {"k": [], "l": "m"}},
            {"false": False, "list": [1, [2]]},
        ),
        ({"zero": False}, {"false": 0}, {"null": "null"}, {"text": None}, {"list": [1, 2]}, {"object": {"k": []}}),
    ),
    Case(
        "constant with quotes",
        {"type": "array", "items": {"const": 'say "hi"\\\n\u2028\t✓'}},
        ([], ['say "hi"\\\n\u2028\t✓'], ['say "hi"\\\n\u2028\t✓'] * 2),
        (["say hi"], ['say "hi"\n\u2028\t✓'], 'say "hi"\\\n\u2028\t✓'),
    ),
)


DEPTH = 50


def _deep_schema(of: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        of = closed({"in": of})
    return of


def _deep(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {"in": value}
    return value


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
        "deep objects",
        _deep_schema(NUMBER, DEPTH),
        (_deep(0, DEPTH), _deep(7, DEPTH), _deep(999, DEPTH)),
        (_deep(1, DEPTH - 1), _deep(1, DEPTH + 1), _deep("1", DEPTH), _deep({}, DEPTH - 1), 1),
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
)


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

CASES = (*VALUES, *FORMAT_CASES, *OBJECTS, *COMPOSED)
