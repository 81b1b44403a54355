"""A conversation as Markdown, for people to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.core.arguments import is_list
from cortexmlx.types.messages import plain_message
from cortexmlx.types.request import Message


def as_markdown(model: str, messages: Sequence[Message]) -> str:
    """Return a heading for each message, and its text unchanged."""
    parts = [f"# A conversation with {model}", *map(section, messages)]
    return "\n\n".join(parts) + "\n"


def section(message: Message) -> str:
    """Return one message: a heading, its text, and its tool calls."""
    text = str(plain_message(message).get("content") or "").strip()
    listed: Any = message.get("tool_calls")
    said = [each.get("function") for each in listed if isinstance(each, Mapping)] if is_list(listed) else []
    calls = [f"    {_call(function)}" for function in said if isinstance(function, Mapping)]
    return "\n\n".join(part for part in (f"## {str(message['role']).capitalize()}", text, "\n".join(calls)) if part)


def _call(function: Mapping[str, Any]) -> str:
    """Return a call as a line of code: `weather({"city": "Paris"})`."""
    arguments = function.get("arguments", "")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name')}({' '.join(written.splitlines())})"
