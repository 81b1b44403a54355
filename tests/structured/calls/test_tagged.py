"""Arguments between tags, as Qwen3-Coder writes them: raw texts, and JSON where the schema takes no text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cortexmlx import InvalidRequest
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.calls.tagged import GLM, QWEN_CODER, Tagged
from cortexmlx.structured.tools import Tool
from support.tool_calls import Call, mapping

SHARED = {"$defs": {"Size": {"enum": ["small", "large"]}, "Point": {"type": "object", "properties": {"x": {}}}}}


def called(schema: dict[str, Any], value: str, **more: Any) -> tuple[Call, ...]:
    tool = Tool.of(mapping("f", {"a": schema}, ["a"], **more))
    parser = AllowedCalls(Tagged(QWEN_CODER), (tool,)).make_parser("key", streaming=True)
    assert parser is not None
    parser.feed(f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>")
    parser.finish()
    return tuple((call.name, call.values) for call in parser.calls)


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " \n x\t\n", " \n x\t\n"),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "-1e3", -1e3),
        ({"type": "boolean"}, "true", True),
        ({"type": "null"}, "null", None),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "nul", "nul"),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5 apples", "5 apples"),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "1.10", "1.10"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", "[1]"),
        ({}, "text", "text"),
        ({}, "5", "5"),
        ({}, '{"a": 1}', '{"a": 1}'),
        ({"enum": ["a b", "c"]}, "a b", "a b"),
        ({"enum": [1, "two"]}, "1", 1),
        ({"const": "x"}, "x", "x"),
        ({"$ref": "#/$defs/Size"}, "large", "large"),
        ({"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
    ],
)
def test_a_value_has_the_type_of_its_schema(schema: dict[str, Any], value: str, read: Any) -> None:
    [(name, values)] = called(schema, value, **SHARED)
    assert (name, values) == ("f", {"a": read})
    assert type(values["a"]) is type(read)


def test_an_empty_text_that_is_written_tightly_takes_no_other_argument() -> None:
    tool = Tool.of(mapping("f", {"a": {"type": "string"}, "b": {"type": "string"}}, ["a", "b"]))
    answer = "<tool_call>\n<function=f>\n<parameter=a>\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n"
    parser = AllowedCalls(Tagged(QWEN_CODER), (tool,)).make_parser("key", streaming=True)
    assert parser is not None
    for char in answer + "</tool_call>":
        parser.feed(char)
    assert [call.values for call in parser.calls] == [{"a": "", "b": "x"}]


def test_a_text_within_json_may_hold_the_closing_tag() -> None:
    """As the grammar allows it."""
    tool = Tool.of(mapping("f", {"a": {"type": "array"}}, ["a"]))
    written = '["</arg_value>", {"</arg_value>": 1}]'
    parser = AllowedCalls(Tagged(GLM), (tool,), "f").make_parser("key", streaming=True)
    assert parser is not None
    for char in f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>":
        parser.feed(char)
    assert [call.values for call in parser.calls] == [{"a": json.loads(written)}]


def test_references_in_a_circle_end() -> None:
    circle = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}}
    assert called({"$ref": "#/$defs/A"}, "x", **circle) == (("f", {"a": "x"}),)
    tree = {"$defs": {"T": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/T"}]}}}
    assert called({"$ref": "#/$defs/T"}, "null", **tree) == (("f", {"a": None}),)


def test_what_a_raw_text_cannot_hold_is_told_or_refused() -> None:
    limited = {"type": "string", "maxLength": 3, "pattern": "^a"}
    tool = Tool.of(mapping("f", {"a": limited, "b": {"enum": ["x"], "maxLength": 3}, "c": {"type": "integer"}}))
    notes = AllowedCalls(Tagged(QWEN_CODER), (tool,)).notes
    assert [note.partition(" is not")[0] for note in notes] == [
        "pattern of 'a' of the tool 'f'",
        "maxLength of 'a' of the tool 'f'",
    ]
    with pytest.raises(InvalidRequest, match="the tool 'f' cannot be enforced: pattern of 'a'"):
        list(Tagged(QWEN_CODER).argument_grammars(0, replace(tool, strict=True), {}))


@pytest.mark.parametrize("key", ["", "a>b", "<a", "a\nb", " a", "a ", "\n"])
def test_a_name_that_cannot_stand_in_a_tag_is_refused(key: str) -> None:
    tool = Tool.of(mapping("f", {key: {"type": "string"}}))
    with pytest.raises(InvalidRequest, match="is no name that this model can write"):
        list(Tagged(QWEN_CODER).argument_grammars(0, tool, {}))


@pytest.mark.parametrize("key", ["a", "a b", 'we"ird', "é-1", "a/b.c"])
def test_other_names_come_back_as_they_are(key: str) -> None:
    tool = Tool.of(mapping("f", {}, [key]))
    parser = AllowedCalls(Tagged(QWEN_CODER), (tool,)).make_parser("key", streaming=True)
    assert parser is not None and len(list(Tagged(QWEN_CODER).argument_grammars(0, tool, {}))) == 1
    parser.feed(f"<tool_call>\n<function=f>\n<parameter={key}>\nx\n</parameter>\n</function>\n</tool_call>")
    assert [call.values for call in parser.calls] == [{key: "x"}]
