"""Tools in bodies of Anthropic's API: `tools`, `tool_choice`, and the calls in replies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols.fields import check_fields, checked, inside
from cortexmlx.protocols.history import known_fields, mend_tool
from cortexmlx.structured.tools import Tool, ToolCall

FIELDS = frozenset({"tools", "tool_choice"})
"""The fields of a body that offer tools."""

_PARTS = ("type", "name", "description", "input_schema", "strict")
HINTS = ("cache_control", "defer_loading", "eager_input_streaming", "input_examples", "toolset_name")
"""Parts of a tool that change no answer here. A tool whose loading is deferred is offered at once."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_LARGEST = 1.7976931348623157e308


def tool_values(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that offer tools, as a body sets them. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    tools: list[Tool] = []
    for place, tool in enumerate(checked("tools", said.get("tools", []), list, "a list of tools")):
        with inside(f"tools[{place}]"):
            tools.append(_tool(tool))
    if tools:
        values["tools"] = tools
    if "tool_choice" in said:
        choice = checked("tool_choice", said["tool_choice"], dict, "an object with a `type`")
        with inside("tool_choice"):
            values |= _choice(choice, [tool.name for tool in tools])
    return values


def input_of(call: ToolCall) -> Any:
    """Return the arguments of a call as a JSON value: with the largest number that JSON readers know in place of a
    larger one. Raises CortexError if they are nested too deeply to be read.
    """
    try:
        return _finite(call.values if call.arguments else {})
    except RecursionError:
        raise CortexError(f"the input of the tool {call.name!r} is nested too deeply: ask without tools") from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(_LARGEST, value)
    return value


def _tool(tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with `name` and `input_schema`")
    given = known_fields(mend_tool(tool), (*_PARTS, *HINTS, "allowed_callers"), "a tool", _PARTS)
    kind = given.get("type", "custom")
    if kind != "custom":
        raise InvalidRequest(
            f"the type {kind!r:.80} is not served: tools that run elsewhere, or whose schema only other models know, "
            "are not there. Leave it out, or describe it with an `input_schema`",
            field="type",
        )
    callers = given.pop("allowed_callers", ["direct"])
    if not isinstance(callers, list) or "direct" not in callers:
        message = f"allowed_callers is {callers!r:.80}, but must have 'direct': nothing else calls tools here"
        raise InvalidRequest(message, field="allowed_callers")
    schema = given.get("input_schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"input_schema is {schema!r:.80}, but must be a JSON schema", field="input_schema")
    try:
        return Tool.named(given.get("name"), given.get("description", ""), schema, given.get("strict", False))
    except InvalidRequest as error:
        error.field = None
        raise


def _choice(choice: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    check_fields(choice, ("type", "name", "disable_parallel_tool_use"), "`tool_choice`")
    values: dict[str, Any] = {}
    if (single := choice.get("disable_parallel_tool_use")) is not None:
        values["parallel_tool_calls"] = not checked("disable_parallel_tool_use", single, bool, "true or false")
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool":
        if name not in names:
            raise InvalidRequest(f"name is {name!r:.80}, but must be that of one of the `tools`", field="name")
        return {**values, "tool_choice": name}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequest(f"type is {kind!r:.80}, but must be auto, any, tool or none", field="type")
    if name is not None:
        raise InvalidRequest("`name` needs the type 'tool'", field="name")
    if kind == "any" and not names:
        raise InvalidRequest("type is 'any', but there are no `tools`", field="type")
    return {**values, "tool_choice": _CHOICES[kind]}
