"""Messages of the OpenAI API, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.fields import prefix_error_field
from cortexmlx.protocols.history import (
    join_pieces,
    note_omitted_thoughts,
    orphan_result_message,
    pick_known_fields,
    pick_message_fields,
    read_arguments,
    read_pieces,
    require_name,
    sanitize_text,
)
from cortexmlx.protocols.images import ImageParts
from cortexmlx.types.messages import check_role
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


def read_messages(messages: object, paths: Sequence[str] = (), images: ImageParts | None = None) -> list[Message]:
    """Convert messages of the OpenAI API into the form that chat templates read.

    They have no nulls, each text is one piece, the arguments of tool calls are objects, and a developer's message is a
    system message. `paths` are the messages' places in their body, if they are not in `messages`. What others wrote and
    no template reads is replaced, and noted: see `history`. A result before the first call is a user's message: many
    templates refuse it otherwise. `images` reads the images of users and tools, for a model that sees.

    Raises InvalidRequest with the number of a message that cannot be meant, or of the last user's message if it has no
    content or an image that cannot be read.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`", field="messages")
    result: list[Message] = []
    has_calls = False
    newest = max((n for n, each in enumerate(messages, 1) if _has_role(each, "user")), default=0)
    for number, message in enumerate(messages, 1):
        try:
            with prefix_error_field(paths[number - 1] if paths else f"messages[{number - 1}]"):
                converted = _read_message(message, images, is_newest=number == newest)
                has_calls |= "tool_calls" in converted
                result.append(
                    converted
                    if has_calls or converted["role"] != "tool"
                    else orphan_result_message(converted["content"])
                )
        except InvalidRequest as error:
            raise InvalidRequest(f"message {number}: {error}", field=error.field) from None
    return result


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


def _has_role(message: object, role: str) -> bool:
    return isinstance(message, Mapping) and message.get("role") == role


def _read_message(message: object, images: ImageParts | None, *, is_newest: bool) -> dict[str, Any]:
    """Convert one message. `is_newest`: it is the last one of a user. Raises InvalidRequest."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"it is {message!r:.80}, but must be an object with `role` and `content`")
    fields = pick_message_fields(message, _MESSAGE_FIELDS, "a message")
    check_role(require_name("role", fields.get("role")))
    role = _ROLES.get(fields["role"], fields["role"])
    if is_newest and fields.get("content") is None:
        raise InvalidRequest("`content` is missing, which a user's message must have", field="content")
    thoughts = _read_thoughts(fields)
    pieces = read_pieces(
        fields.get("content"),
        loose=role == "tool",
        thoughts=thoughts if role == "assistant" else None,
        images=images if role in ("user", "tool") else None,
        strict=is_newest,
    )
    converted: dict[str, Any] = {
        "role": role,
        "content": join_pieces(pieces) or sanitize_text(_text_or_empty(fields.get("refusal"))),
    }
    converted |= {name: require_name(name, fields[name]) for name in _ID_FIELDS if name in fields}
    if any(thoughts):
        converted["reasoning_content"] = sanitize_text("".join(thoughts))
    function_call = fields.get("function_call")
    if calls := fields.get("tool_calls") or (
        [{"function": function_call}] if isinstance(function_call, Mapping) else []
    ):
        converted["tool_calls"] = _read_calls(calls)
    return converted


def _read_thoughts(fields: Mapping[str, Any]) -> list[str]:
    """Return the thoughts of a message, from whichever field its server has for them."""
    if text := next(
        (fields[name] for name in _THOUGHT_FIELDS if isinstance(fields.get(name), str) and fields[name]), ""
    ):
        return [text]
    texts = [
        _text_or_empty(each.get("text", each.get("thinking")))
        for name in _THOUGHT_LISTS
        for each in (fields[name] if isinstance(fields.get(name), list) else ())
        if isinstance(each, Mapping)
    ]
    if not any(texts) and any(fields.get(name) for name in (*_THOUGHT_FIELDS, *_THOUGHT_LISTS)):
        note_omitted_thoughts()
    return texts


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""


def _read_calls(calls: object) -> list[dict[str, Any]]:
    """Return the tool calls of a message, with their arguments as objects instead of JSON text."""
    if not isinstance(calls, list):
        raise InvalidRequest("`tool_calls` must be a list of calls", field="tool_calls")
    converted = []
    for index, call in enumerate(calls):
        with prefix_error_field(f"tool_calls[{index}]"):
            if call is not None:  # a stream whose first call has the index 1 leaves a hole
                converted.append(_read_call(call))
    return converted


def _read_call(call: object) -> dict[str, Any]:
    """Return one tool call. A custom tool's text becomes its only argument, `input`."""
    fields = pick_known_fields(call, _CALL_FIELDS, "a tool call") if isinstance(call, Mapping) else {}
    custom = fields.get("custom")
    function = (
        {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        if isinstance(custom, Mapping)
        else fields.get("function")
    )
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("`tool_calls` has one without a `function` that has a `name`", field="function")
    with prefix_error_field("function"):
        name = require_name("name", function["name"])
    call_fields = {"id": require_name("id", fields["id"])} if "id" in fields else {}
    call_fields |= {"type": "function"} if "type" in fields else {}
    return {**call_fields, "function": {"name": name, "arguments": read_arguments(function.get("arguments"))}}
