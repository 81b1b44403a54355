"""Schemas of values: numbers, texts with lengths and patterns, constants and lists of values."""

from __future__ import annotations

from support.schemas.case import Case, closed

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
        "integer with one bound",
        closed({"from": {"type": "integer", "minimum": 18}, "to": {"type": "integer", "maximum": -3}}),
        ({"from": 18, "to": -3}, {"from": 10**9, "to": -4}, {"from": 99, "to": -(10**9)}),
        ({"from": 17, "to": -3}, {"from": 18, "to": -2}, {"from": -18, "to": -3}, {"from": 18, "to": 3}),
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
        "number between two bounds",
        {"type": "number", "minimum": -1.5, "maximum": 2.25},
        (-1.5, -1, 0, 0.001, 2.25),
        (-1.51, 2.26, 3, -2, "1", True),
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
        "one of three types",
        {"type": ["integer", "boolean", "array"], "minimum": 3, "maxItems": 1},
        (3, True, False, [], ["x"]),
        (2, 3.5, "3", None, [1, 2], {}),
    ),
    Case(
        "no type", closed({"any": {}}), ({"any": None}, {"any": [{}, 1.5]}, {"any": {"b": "c"}}), ({}, {"ani": 1}, [])
    ),
    Case(
        "text of bounded length",
        {"type": "string", "minLength": 2, "maxLength": 5},
        ("ab", "é🙂", "漢字漢字漢", 'a"\\\n\t'),
        ("", "a", "🙂", "abcdef", "漢字漢字漢字", 12),
    ),
    Case("text that is not empty", {"type": "string", "minLength": 1}, ("a", " ", "\u2028", "x" * 99), ("", None, [])),
    Case(
        "text of exact length",
        {"type": "string", "minLength": 3, "maxLength": 3},
        ("abc", "   ", "äöü"),
        ("ab", "abcd", ""),
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
        "pattern with one anchor",
        {"type": "string", "pattern": "^(?:img|doc)/"},
        ("img/", "doc/a b", "img/é"),
        ("/img/", "img", "pdf/img/"),
    ),
    Case(
        "pattern of letters of any script",
        {"type": "string", "pattern": r"^\p{Lu}\p{Ll}+( \p{Lu}\p{Ll}+)?$"},
        ("Élodie", "Ωmega Ärger", "Иван Петров"),
        ("élodie", "E", "Élodie  X", "漢字", "Ab C", "Ab1"),
    ),
    Case(
        "pattern of a script",
        {"type": "string", "pattern": "^[а-яё]+(-[а-яё]+)*$"},
        ("да", "ёж", "кое-как"),
        ("", "da", "да-", "Да"),
    ),
    Case(
        "pattern with classes and escapes",
        {"type": "string", "pattern": r"^(\+|00)[1-9]\d{0,2}[ ./\-]?\d{3,10}$"},
        ("+49 12345", "0033123", "+1.555"),
        ("49 12345", "+0 12345", "+49  12345", "+49 12"),
    ),
    Case(
        "pattern of a path with backslashes",
        {"type": "string", "pattern": r"^[A-Z]:\\(\w+\\)*\w*$"},
        ("C:\\", "C:\\Users\\me", "D:\\a\\b\\"),
        ("C:", "C:/Users", "c:\\", "C:\\\\x"),
    ),
    Case(
        "pattern and length",
        {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 4},
        ("aa", "bab", "abab"),
        ("a", "ababa", "abc"),
    ),
    Case(
        "list of texts",
        {"enum": ["red", "green", "greenish", "", 'a "b"', "c\\d", "é\n"]},
        ("green", "greenish", "", 'a "b"', "c\\d", "é\n"),
        ("gree", "Red", " ", "c\\\\d", None),
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
