"""Tools in bodies of the OpenAI API: `tools`, `tool_choice`, and the calls in replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import checked, inside
from cortexmlx.protocols.history import known_fields, mend_tool
from cortexmlx.protocols.request import Body
from cortexmlx.structured.tools import CallDelta, Tool, ToolCall

FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
"""The fields of a body that offer tools."""

_FUNCTION = ("name", "description", "parameters", "strict")


def tool_values(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that offer tools, as a body sets them. Raises InvalidRequest."""
    values: dict[str, Any] = {}
    if "tools" in said:
        listed = checked("tools", said["tools"], list, "a list of tools")
        tools = []
        for place, tool in enumerate(listed):
            with inside(f"tools[{place}]"):
                tools.append(_tool(tool))
        values["tools"] = tools
    if "tool_choice" in said:
        values["tool_choice"] = _choice(said["tool_choice"])
    if "parallel_tool_calls" in said:
        values["parallel_tool_calls"] = said["parallel_tool_calls"]
    return values


def call_bodies(calls: Sequence[ToolCall]) -> list[Body]:
    """Return the calls of a message."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def delta_bodies(deltas: Sequence[CallDelta]) -> list[Body]:
    """Return the pieces of calls in a chunk. The first piece of a call has its id and its name."""
    return [
        {
            "index": delta.index,
            **({"id": delta.id, "type": "function"} if delta.name else {}),
            "function": {**({"name": delta.name} if delta.name else {}), "arguments": delta.arguments},
        }
        for delta in deltas
    ]


def whole(calls: Sequence[ToolCall], first: int) -> tuple[CallDelta, ...]:
    """Return the calls from number `first` on as pieces."""
    return tuple(CallDelta(first + n, call.id, call.name, call.arguments) for n, call in enumerate(calls[first:]))


def _tool(tool: object) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequest(f"a tool is {tool!r:.80}, but must be an object with `type` and `function`")
    said = known_fields(mend_tool(tool), ("type", "function"), "a tool", ("function",))
    if isinstance(function := said.get("function"), Mapping):
        said["function"] = known_fields(function, _FUNCTION, "a tool's function", _FUNCTION)
    try:
        return Tool.of(said)
    except InvalidRequest as error:
        error.field = None
        raise


def _choice(choice: object) -> object:
    """Return a `tool_choice` as a text: a function's name for an object that names it."""
    if not isinstance(choice, Mapping):
        return choice
    named = choice.get("function")
    if choice.get("type") != "function" or not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        example = '{"type": "function", "function": {"name": ...}}'
        raise InvalidRequest(
            f"tool_choice is {dict(choice)!r:.80}, but must be auto, none, required or {example}", field="tool_choice"
        )
    return named["name"]
