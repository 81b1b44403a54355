"""The tools of a response: groups and custom tools are functions of the model, and are named back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Tool as TheirTool
from pydantic import TypeAdapter

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.responses.offered import (
    IGNORED_TOOL_TYPES,
    MAX_NAME_LENGTH,
    ClientTool,
    OfferedTools,
    read_offered_tools,
)
from cortexmlx.structured.tools import MAX_TOOLS

FIND: Any = {"type": "function", "name": "find"}
GROUP: Any = {"type": "namespace", "name": "crm", "description": "d", "tools": [FIND, {**FIND, "name": "list"}]}
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
THEIRS: TypeAdapter[Any] = TypeAdapter(TheirTool)


def offered(*tools: Any, **said: Any) -> tuple[OfferedTools, dict[str, Any]]:
    return read_offered_tools({"tools": list(tools), **said})


def names(*tools: Any, **said: Any) -> list[str]:
    return [tool.name for tool in offered(*tools, **said)[0].tools]


def test_the_functions_of_a_group_have_its_name_before_theirs() -> None:
    made, values = offered(FIND, GROUP)
    assert [tool.name for tool in made.tools] == ["find", "crm__find", "crm__list"]
    assert values["tools"] == list(made.tools)
    assert made.client_tool("crm__find") == ClientTool("find", "crm") and made.client_tool("find") == ClientTool("find")
    assert made.function_name("crm", "find") == "crm__find" == OfferedTools().function_name("crm", "find")
    assert names({**GROUP, "name": "mcp__files__"}) == ["mcp__files__find", "mcp__files__list"]


NAME = st.text("ab_", min_size=1, max_size=70)


@given(st.lists(st.tuples(NAME, st.lists(NAME, min_size=1, max_size=4, unique=True)), max_size=4), st.sets(NAME))
def test_all_names_are_short_and_lead_back(groups: list[tuple[str, list[str]]], own: set[str]) -> None:
    tools = [{**GROUP, "name": name, "tools": [{**FIND, "name": each} for each in inner]} for name, inner in groups]
    asked = {(name, each) for name, inner in groups for each in inner} | {(None, name) for name in own}
    count = sum(len(inner) for _, inner in groups) + len(own)
    try:
        made, _ = offered(*tools, *({**FIND, "name": name} for name in own))
    except InvalidRequest as error:
        assert "two tools are called" in str(error) and len(asked) < count
        return
    called = {(made.client_tool(tool.name).namespace, made.client_tool(tool.name).name) for tool in made.tools}
    assert called == asked and len(made.tools) == count
    assert all(len(tool.name) <= MAX_NAME_LENGTH for tool in made.tools if made.client_tool(tool.name).namespace)
    assert all(made.function_name(*pair) in {tool.name for tool in made.tools} for pair in asked)


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    made, _ = offered({"type": "custom", "name": "patch", "description": "d", "format": GRAMMAR})
    [tool] = made.tools
    assert tool.schema["required"] == ["input"] and GRAMMAR["definition"] in tool.description
    assert made.client_tool("patch").custom and "not enforced" in made.notes[0]
    assert not offered({"type": "custom", "name": "patch", "format": {"type": "text"}})[0].notes


def test_tools_that_the_apis_own_server_runs_are_left_out() -> None:
    made, _ = offered(*({"type": kind, "anything": 1} for kind in sorted(IGNORED_TOOL_TYPES)), FIND)
    assert [tool.name for tool in made.tools] == ["find"] and [tool["name"] for tool in made.reply_tools] == ["find"]


def test_the_openai_package_knows_every_type_of_tool_that_is_left_out() -> None:
    for kind in ("function", "custom", "namespace", *sorted(IGNORED_TOOL_TYPES - {"computer_use"})):
        said = {"type": kind, "name": "n", "description": "d", "tools": [], "server_label": "s", "container": "c"}
        more = {"vector_store_ids": [], "display_height": 1, "display_width": 1, "environment": "mac"}
        with_parameters = {**said, **more, "parameters": {}, "strict": False}
        if kind == "shell":
            del with_parameters["environment"]
        assert THEIRS.validate_python(with_parameters).type == kind


def test_the_shown_tools_are_those_that_were_offered() -> None:
    custom = {"type": "custom", "name": "patch", "format": GRAMMAR}
    made, _ = offered(GROUP, FIND, custom, {"type": "web_search"})
    shown = [THEIRS.validate_python(tool) for tool in made.reply_tools]
    assert [tool.type for tool in shown] == ["namespace", "function", "custom"]
    assert [tool.name for tool in shown[0].tools] == ["find", "list"]
    assert made.reply_tools[1] == {**FIND, "description": None, "parameters": None, "strict": False}
    again, _ = offered(*made.reply_tools)
    assert again == made


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ("find", "find"),
        ({"type": "function", "name": "find"}, "find"),
        ({"type": "function", "name": "list"}, "crm__list"),
        ({"type": "function", "name": "find", "namespace": "crm"}, "crm__find"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ],
)
def test_a_choice_names_a_tool_as_the_model_knows_it(choice: Any, read: str) -> None:
    _, values = offered(FIND, GROUP, {"type": "custom", "name": "patch"}, tool_choice=choice)
    assert values["tool_choice"] == read


def test_only_allowed_tools_are_offered() -> None:
    def allowed(mode: str, *tools: Any) -> Any:
        made, values = offered(FIND, GROUP, tool_choice={"type": "allowed_tools", "mode": mode, "tools": list(tools)})
        assert [tool.name for tool in made.tools] == [tool.name for tool in values["tools"]]
        return values["tool_choice"], [tool.name for tool in made.tools]

    assert allowed("auto", FIND) == ("auto", ["find"])
    assert allowed("required", {"type": "function", "name": "list"}) == ("required", ["crm__list"])
    assert allowed("auto", {"type": "namespace", "name": "crm"}) == ("auto", ["crm__find", "crm__list"])
    assert allowed("auto", {"type": "web_search"}) == ("auto", [])


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**FIND, "parameter": {}}]}, "tools[0].parameter"),
        ({"tools": [{**FIND, "description": 5}]}, "tools[0].description"),
        ({"tools": [{**FIND, "parameters": 5}]}, "tools[0]"),
        ({"tools": [FIND, FIND]}, "tools[1].name"),
        ({"tools": [{**GROUP, "tools": [GROUP]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**GROUP, "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**GROUP, "tools": {}}]}, "tools[0].tools"),
        ({"tools": [{**GROUP, "name": None}]}, "tools[0].name"),
        ({"tools": [{**FIND, "name": str(n)} for n in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "x"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "custom", "name": "a", "format": 5}]}, "tools[0].format"),
        ({"tool_choice": "find"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": ["web_search"]}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FIND]}}, "tool_choice.tools[0]"),
        (
            {"tools": [GROUP, {**GROUP, "name": "b"}], "tool_choice": {"type": "function", "name": "find"}},
            "tool_choice",
        ),
    ],
)
def test_an_error_names_the_tool(said: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_offered_tools(said)
    assert refused.value.field == field


@pytest.mark.parametrize("nulls", [("strict",), ("parameters",), ("description", "parameters", "strict", "async")])
def test_nulls_are_as_if_they_were_not_there(nulls: tuple[str, ...]) -> None:
    assert offered({**FIND, **dict.fromkeys(nulls)})[0].tools == offered(FIND)[0].tools


def test_a_schema_may_say_that_nothing_is_required_with_null() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}, "required": None}
    [tool] = offered({**FIND, "parameters": parameters})[0].tools
    assert "required" not in json.loads(tool.parameters) and not tool.strict


def test_a_choice_whose_type_is_no_text_is_refused() -> None:
    body = {"tools": [], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": {"a": 1}}]}}
    with pytest.raises(InvalidRequest):
        read_offered_tools(body)
