"""What schemas say of arguments whose texts stand as they are. jsonschema judges what the grammar takes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from cortexmlx.errors import InvalidRequest
from cortexmlx.structured.calls.argument import Arguments, find_broken_reference, required_arguments
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.calls.tagged import QWEN_CODER, Tagged
from cortexmlx.structured.compiler import grammar_source
from cortexmlx.structured.tools import Tool
from support.tool_calls import mapping

SHARED: dict[str, Any] = {
    "Size": {"enum": ["small", "large"], "type": "string"},
    "Short": {"type": "string", "maxLength": 2},
    "a/b~c d": {"type": "integer"},
    "Tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Tree"}]},
}

SCHEMAS: list[Any] = [
    {},
    True,
    {"type": "string"},
    {"type": "integer"},
    {"type": ["string", "null"]},
    {"type": "string", "maxLength": 2},
    {"enum": ["small", 5, None, True]},
    {"const": "large"},
    {"$ref": "#/$defs/Size"},
    {"$ref": "#/$defs/a~1b~0c%20d"},
    {"$ref": "#/$defs/Tree/anyOf/0"},
    {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
    {"anyOf": [{"$ref": "#/$defs/Short"}, {"type": "null"}]},
    {"anyOf": [{"const": "large"}, {"const": "small"}, {"type": "boolean"}]},
    {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"type": "integer", "anyOf": [{"minimum": 9}, {"maximum": 5}]},
    {"allOf": [{"$ref": "#/$defs/a~1b~0c%20d"}]},
    {"allOf": [{"$ref": "#/$defs/Short"}]},
    {"anyOf": [{"enum": ["small"]}, {"type": "string", "pattern": "^l"}]},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"$ref": "#/properties/a/prefixItems/0"}},
]

VALUES: list[Any] = ["small", "large", "li", "any text", "5", "null", 5, 7, None, True, {"a": "b"}, [1], [1, "x"]]
VALUES += [[{"a": []}]]


def whole(schema: Any) -> Tool:
    return Tool.of(mapping("f", {"a": schema}, ["a"], **{"$defs": SHARED}))


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_what_the_grammar_takes_fits_the_schema_or_there_is_a_note(schema: Any) -> None:
    calls = AllowedCalls(Tagged(QWEN_CODER), (whole(schema),), "f")
    bytes_ = LLTokenizer("byte")
    grammar = LLMatcher(bytes_, grammar_source(None, None, False, {}, calls), log_level=0)
    assert not grammar.get_error()
    taken = 0
    for value in VALUES:
        written = value if isinstance(value, str) else json.dumps(value)
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
        matcher, tokens = grammar.deep_copy(), bytes_.tokenize_str(text)
        if matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting():
            assert not jsonschema.Draft202012Validator(calls.tools[0].schema).is_valid({"a": value})
            continue
        taken += 1
        parser = calls.make_parser("key", streaming=True)
        assert parser is not None
        parser.feed(text)
        [call] = parser.calls
        assert calls.notes or jsonschema.validate(call.values, calls.tools[0].schema) is None
    assert taken


def test_what_is_not_enforced_is_noted_wherever_it_stands() -> None:
    def notes(schema: Any) -> list[str]:
        return [note.partition(" ")[0] for note in AllowedCalls(Tagged(QWEN_CODER), (whole(schema),)).notes]

    assert notes({"anyOf": [{"$ref": "#/$defs/Short"}, {"type": "null"}]}) == ["maxLength"]
    assert notes({"anyOf": [{"enum": ["small"]}, {"type": "string"}]}) == ["enum"]
    assert notes({"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]}) == []
    together = mapping("f", {"a": {}, "b": {}}, anyOf=[{"required": ["a"]}, {"required": ["b"]}])
    assert AllowedCalls(Tagged(QWEN_CODER), (Tool.of(together),)).notes == (
        "anyOf of the tool 'f' is not enforced: each argument is written by itself",
    )


def test_arguments_are_found_behind_a_reference() -> None:
    """pydantic writes a type that holds itself so."""
    node = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = Tool.named("f", "", {"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    assert list(Arguments(tool)) == required_arguments(tool) == ["a"]
    assert Arguments(tool)["a"].types == {"integer"}


@pytest.mark.parametrize("reference", ["#/nowhere", "http://x", "#/$defs/Tree/anyOf/7", "#/properties/a"])
def test_a_reference_that_leads_nowhere_is_refused(reference: str) -> None:
    tool = whole({"$ref": reference})
    assert find_broken_reference(tool) == reference
    with pytest.raises(InvalidRequest, match="leads nowhere"):
        list(Tagged(QWEN_CODER).argument_grammars(0, tool, {}))


@pytest.mark.parametrize("value", [5, "x", [1], {"a": 1}, None, [[]]])
@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "enum", "type", "$defs", "maxLength", "const"])
def test_a_keyword_of_another_type_raises_nothing_else(keyword: str, value: Any) -> None:
    """llguidance refuses what it reads; the rest is no schema, and any text fits it."""
    tool = whole({keyword: value})
    try:
        list(Tagged(QWEN_CODER).argument_grammars(0, tool, {}))
    except InvalidRequest:
        return
    assert isinstance(AllowedCalls(Tagged(QWEN_CODER), (tool,)).notes, tuple)


def test_a_reference_is_followed_once() -> None:
    """Otherwise the ways of this one would be as many as a hundred to the power of the depth."""
    many = {"anyOf": [{"$ref": "#/$defs/Many"}] * 100 + [{"type": "boolean"}]}
    tool = Tool.of(mapping("f", {"a": {"$ref": "#/$defs/Many"}}, **{"$defs": {"Many": many}}))
    assert Arguments(tool)["a"].types == {"boolean"}


def test_very_deep_ways_end() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(300):
        deep = {"anyOf": [deep]}
    assert Arguments(whole(deep))["a"].is_free_text
