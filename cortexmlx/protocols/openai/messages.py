"""Messages of the OpenAI API, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import inside
from cortexmlx.protocols.history import (
    checked_name,
    known_fields,
    leave_out_thoughts,
    mend,
    message_fields,
    orphan,
    read_arguments,
    read_text,
)
from cortexmlx.types.request import Message

_NAMES = ("name", "tool_call_id")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The names that servers have for the thoughts before an answer."""
_THOUGHT_LISTS = ("reasoning_details", "thinking_blocks")
"""OpenRouter's and LiteLLM's lists of thoughts."""
_FIELDS = ("role", "content", "tool_calls", "function_call", "refusal", *_NAMES, *_THOUGHTS, *_THOUGHT_LISTS)
_CALL = ("id", "type", "function", "custom")
_ROLES = {"developer": "system", "function": "tool"}
"""Roles of the OpenAI API under the names that templates know."""


def read_messages(messages: object, paths: Sequence[str] = ()) -> list[Message]:
    """Return messages of the OpenAI API as chat templates read them.

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
            with inside(paths[number - 1] if paths else f"messages[{number - 1}]"):
                said = _message(message)
                called |= "tool_calls" in said
                read.append(said if called or said["role"] != "tool" else orphan(str(said["content"])))
        except InvalidRequest as error:
            raise InvalidRequest(f"message {number}: {error}", field=error.field) from None
    return read


def messages_in(content: object) -> list[Message] | None:
    """Return the messages in a file's content, or None if it is something else. Raises InvalidRequest.

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


def parsed(text: str) -> Any:
    """Return the JSON value of a text, or a list of the JSON values in its lines, or None if the text is neither."""
    text = text.removeprefix("\ufeff")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]  # not splitlines: a text may have U+2028
    except (ValueError, RecursionError):
        return None


def _message(message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"it is {message!r:.80}, but must be an object with `role` and `content`")
    said = message_fields(message, _FIELDS, "a message")
    role = _ROLES.get(checked_name("role", said.get("role")), said["role"])
    thoughts = _thoughts(said)
    content = read_text(said.get("content"), loose=role == "tool", thoughts=thoughts if role == "assistant" else None)
    read: dict[str, object] = {"role": role, "content": content or mend(_as_text(said.get("refusal")))}
    read |= {name: checked_name(name, said[name]) for name in _NAMES if name in said}
    if any(thoughts):
        read["reasoning_content"] = mend("".join(thoughts))
    older = said.get("function_call")
    if calls := said.get("tool_calls") or ([{"function": older}] if isinstance(older, Mapping) else []):
        read["tool_calls"] = _calls(calls)
    return read


def _thoughts(said: Mapping[str, Any]) -> list[str]:
    """Return the thoughts in the field of a message that the server has which wrote it."""
    if text := next((said[name] for name in _THOUGHTS if isinstance(said.get(name), str) and said[name]), ""):
        return [text]
    texts = [
        _as_text(each.get("text", each.get("thinking")))
        for name in _THOUGHT_LISTS
        for each in (said[name] if isinstance(said.get(name), list) else ())
        if isinstance(each, Mapping)
    ]
    if not any(texts) and any(said.get(name) for name in (*_THOUGHTS, *_THOUGHT_LISTS)):
        leave_out_thoughts()
    return texts


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _calls(calls: object) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as an object, as templates expect. In the OpenAI API they are JSON
    text.
    """
    if not isinstance(calls, list):
        raise InvalidRequest("`tool_calls` must be a list of calls", field="tool_calls")
    read = []
    for place, call in enumerate(calls):
        with inside(f"tool_calls[{place}]"):
            if call is not None:  # a stream whose first call has the index 1 leaves a hole
                read.append(_call(call))
    return read


def _call(call: object) -> dict[str, Any]:
    """Return a call of a function, or of a custom tool, whose only argument is a text."""
    said = known_fields(call, _CALL, "a tool call") if isinstance(call, Mapping) else {}
    custom = said.get("custom")
    function = (
        {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        if isinstance(custom, Mapping)
        else said.get("function")
    )
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("`tool_calls` has one without a `function` that has a `name`", field="function")
    with inside("function"):
        name = checked_name("name", function["name"])
    kept = {"id": checked_name("id", said["id"])} if "id" in said else {}
    kept |= {"type": "function"} if "type" in said else {}
    return {**kept, "function": {"name": name, "arguments": read_arguments(function.get("arguments"))}}
