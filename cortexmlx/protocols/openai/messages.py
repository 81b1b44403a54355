"""Messages of the OpenAI API, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import prefix_error_field
from cortexmlx.protocols.history import (
    note_omitted_thoughts,
    orphan_result_message,
    pick_known_fields,
    pick_message_fields,
    read_arguments,
    read_text,
    require_name,
    sanitize_text,
)
from cortexmlx.types.request import Message

_ID_FIELDS = ("name", "tool_call_id")
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names that servers have for the thoughts before an answer."""
_THOUGHT_LISTS = ("reasoning_details", "thinking_blocks")
"""OpenRouter's and LiteLLM's lists of thoughts."""
_MESSAGE_FIELDS = (
    "role",
    "content",
    "tool_calls",
    "function_call",
    "refusal",
    *_ID_FIELDS,
    *_THOUGHT_FIELDS,
    *_THOUGHT_LISTS,
)
_CALL_FIELDS = ("id", "type", "function", "custom")
_ROLES = {"developer": "system", "function": "tool"}
"""Roles of the OpenAI API under the names that templates know."""


def read_messages(messages: object, paths: Sequence[str] = ()) -> list[Message]:
    """Convert messages of the OpenAI API into the form that chat templates read.

    They have no nulls, each text is one piece, the arguments of tool calls are objects, and a developer's message is a
    system message. `paths` are the messages' places in their body, if they are not in `messages`. What others wrote and
    no template reads is replaced, and noted: see `history`. A result before the first call is a user's message: many
    templates refuse it otherwise.

    Raises InvalidRequest with the number of a message that cannot be meant.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`", field="messages")
    read: list[Message] = []
    called = False
    for number, message in enumerate(messages, 1):
        try:
            with prefix_error_field(paths[number - 1] if paths else f"messages[{number - 1}]"):
                said = _read_message(message)
                called |= "tool_calls" in said
                read.append(said if called or said["role"] != "tool" else orphan_result_message(str(said["content"])))
        except InvalidRequest as error:
            raise InvalidRequest(f"message {number}: {error}", field=error.field) from None
    return read


def find_messages(content: object) -> list[Message] | None:
    """Return the messages in the JSON content of a file, or None if it has none. Raises InvalidRequest.

    The content is a list of messages, one message, an object with `messages` (such as the body of a request), or a list
    of one such object.
    """
    if isinstance(content, Mapping):
        content = content.get("messages", [content] if "role" in content else None)
    if not isinstance(content, list) or not content:
        return None
    if all(isinstance(each, Mapping) and "messages" in each for each in content):
        if len(content) > 1:
            raise InvalidRequest(f"it has {len(content):,} conversations: keep one of them in a file")
        content = content[0]["messages"]
    return read_messages(content) if isinstance(content, list) and content else None


def parse_json_or_lines(text: str) -> Any:
    """Parse a text as JSON, or else as JSON lines, which become a list; None if it is neither."""
    text = text.removeprefix("\ufeff")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]  # not splitlines: a text may have U+2028
    except (ValueError, RecursionError):
        return None


def _read_message(message: object) -> dict[str, object]:
    """Convert one message. Raises InvalidRequest."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"it is {message!r:.80}, but must be an object with `role` and `content`")
    said = pick_message_fields(message, _MESSAGE_FIELDS, "a message")
    role = _ROLES.get(require_name("role", said.get("role")), said["role"])
    thoughts = _read_thoughts(said)
    content = read_text(said.get("content"), loose=role == "tool", thoughts=thoughts if role == "assistant" else None)
    read: dict[str, object] = {"role": role, "content": content or sanitize_text(_text_or_empty(said.get("refusal")))}
    read |= {name: require_name(name, said[name]) for name in _ID_FIELDS if name in said}
    if any(thoughts):
        read["reasoning_content"] = sanitize_text("".join(thoughts))
    older = said.get("function_call")
    if calls := said.get("tool_calls") or ([{"function": older}] if isinstance(older, Mapping) else []):
        read["tool_calls"] = _read_calls(calls)
    return read


def _read_thoughts(said: Mapping[str, Any]) -> list[str]:
    """Return the thoughts of a message, from whichever field its server has for them."""
    if text := next((said[name] for name in _THOUGHT_FIELDS if isinstance(said.get(name), str) and said[name]), ""):
        return [text]
    texts = [
        _text_or_empty(each.get("text", each.get("thinking")))
        for name in _THOUGHT_LISTS
        for each in (said[name] if isinstance(said.get(name), list) else ())
        if isinstance(each, Mapping)
    ]
    if not any(texts) and any(said.get(name) for name in (*_THOUGHT_FIELDS, *_THOUGHT_LISTS)):
        note_omitted_thoughts()
    return texts


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


def _read_calls(calls: object) -> list[dict[str, Any]]:
    """Return the tool calls of a message, with their arguments as objects instead of JSON text."""
    if not isinstance(calls, list):
        raise InvalidRequest("`tool_calls` must be a list of calls", field="tool_calls")
    read = []
    for place, call in enumerate(calls):
        with prefix_error_field(f"tool_calls[{place}]"):
            if call is not None:  # a stream whose first call has the index 1 leaves a hole
                read.append(_read_call(call))
    return read


def _read_call(call: object) -> dict[str, Any]:
    """Return one tool call. A custom tool's text becomes its only argument, `input`."""
    said = pick_known_fields(call, _CALL_FIELDS, "a tool call") if isinstance(call, Mapping) else {}
    custom = said.get("custom")
    function = (
        {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        if isinstance(custom, Mapping)
        else said.get("function")
    )
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("`tool_calls` has one without a `function` that has a `name`", field="function")
    with prefix_error_field("function"):
        name = require_name("name", function["name"])
    kept = {"id": require_name("id", said["id"])} if "id" in said else {}
    kept |= {"type": "function"} if "type" in said else {}
    return {**kept, "function": {"name": name, "arguments": read_arguments(function.get("arguments"))}}
