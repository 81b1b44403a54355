"""Tools of Anthropic's API: those of a body, which to call, and the calls in replies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols.anthropic.messages import input_of, tool_values
from cortexmlx.structured.tools import ToolCall
from cortexmlx.types.sampling_params import SamplingParams

SCHEMA: Any = {"$schema": "x", "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def tool(**more: Any) -> dict[str, Any]:
    return {"name": "f", "description": "d", "input_schema": SCHEMA, **more}


def test_the_tools_of_a_body_are_those_of_the_request() -> None:
    hints = {"cache_control": {}, "defer_loading": True, "eager_input_streaming": True, "input_examples": [{}]}
    asked = [tool(type="custom", strict=True), tool(name="g", **hints, allowed_callers=["direct"], description=None)]
    f, g = SamplingParams(**tool_values({"tools": asked})).offered
    assert (f.name, f.description, f.schema, f.strict) == ("f", "d", SCHEMA, True)
    assert (g.name, g.description, g.strict) == ("g", "", False)
    bare = {"type": "object", "properties": None, "required": None}
    assert tool_values({"tools": [tool(input_schema=bare)]})["tools"][0].schema == {"type": "object"}
    assert tool_values({}) == tool_values({"tools": []}) == {}


@pytest.mark.parametrize(
    ("choice", "values"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": "f"}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"type": "any", "disable_parallel_tool_use": False},
            {"tool_choice": "required", "parallel_tool_calls": True},
        ),
    ],
)
def test_a_choice_is_that_of_the_request(choice: dict[str, Any], values: dict[str, Any]) -> None:
    got = tool_values({"tools": [tool()], "tool_choice": choice})
    got.pop("tools")
    assert got == values


@pytest.mark.parametrize(
    ("said", "field", "says"),
    [
        ({"tools": {}}, "tools", "a list"),
        ({"tools": [5]}, "tools[0]", "an object"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search_20250305"),
        ({"tools": [tool(type=5)]}, "tools[0].type", "not served"),
        ({"tools": [tool(), tool(input_schema="x")]}, "tools[1].input_schema", "JSON schema"),
        ({"tools": [tool(input_schema={"type": "string"})]}, "tools[0]", "schema of an object"),
        ({"tools": [tool(name="a b")]}, "tools[0]", "'a b'"),
        ({"tools": [tool(name=None)]}, "tools[0]", "None"),
        ({"tools": [{"name": "f", "inputschema": {}}]}, "tools[0].inputschema", "did you mean 'input_schema'"),
        ({"tools": [tool(strict="yes")]}, "tools[0]", "true or false"),
        ({"tools": [tool(allowed_callers=["code_execution_20250825"])]}, "tools[0].allowed_callers", "direct"),
        ({"tool_choice": "auto"}, "tool_choice", "an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "no `tools`"),
        ({"tool_choice": {"type": "tool", "name": "none"}}, "tool_choice.name", "one of the `tools`"),
        ({"tool_choice": {"type": "tool", "name": []}}, "tool_choice.name", "one of the `tools`"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name", "type 'tool'"),
        ({"tool_choice": {"type": []}}, "tool_choice.type", "auto, any"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
            "t",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(said: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        tool_values(said)
    assert raised.value.field == field


def test_the_input_of_a_call_is_json() -> None:
    assert input_of(ToolCall("1", "f", '{"a": [1e999, -1e999, 1.5, "x", null]}')) == {
        "a": [1.7976931348623157e308, -1.7976931348623157e308, 1.5, "x", None]
    }
    assert input_of(ToolCall("1", "f", "")) == {}
    digits = "9" * 5000
    assert json.loads(json.dumps(input_of(ToolCall("1", "f", f'{{"a": {digits}}}')), allow_nan=False))
    with pytest.raises(CortexError, match="nested too deeply"):
        input_of(ToolCall("1", "f", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"))
