"""Messages of the OpenAI API, as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import plain_message
from cortexmlx.protocols.fields import check_fields, inside
from cortexmlx.request import Message
from cortexmlx.structured.texts import NO_TEXT, is_text
from cortexmlx.tools.call import loaded

_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "reasoning_content")
_TEXTS = ("role", "name", "tool_call_id", "reasoning_content", "content")
_CALL = ("id", "type", "function", "index")


def read_messages(messages: object, paths: Sequence[str] = ()) -> list[Message]:
    """Return messages of the OpenAI API as chat templates read them.

    They have no nulls, each text is one piece, the arguments of tool calls are objects, and a developer's message is a
    system message. `paths` are the messages' places in their body, if they are not in `messages`.

    Raises InvalidRequest with the number of an invalid or unserved message. Nothing is left out silently: an answer
    without it would answer another question.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`", field="messages")
    read: list[Message] = []
    for number, message in enumerate(messages, 1):
        try:
            with inside(paths[number - 1] if paths else f"messages[{number - 1}]"):
                read.append(_message(message))
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
    said = {name: value for name, value in message.items() if value is not None}
    check_fields(said, _FIELDS, "a message")
    if not isinstance(said.get("role"), str):
        raise InvalidRequest(f"`role` is {said.get('role')!r:.80}, but must be a text", field="role")
    if "refusal" in said:
        raise InvalidRequest("`refusal` is not served: templates know none. Put it into `content`", field="refusal")
    if said.pop("annotations", None):
        raise InvalidRequest("`annotations` are not served: templates know none", field="annotations")
    if said["role"] == "developer":
        said["role"] = "system"
    if said.get("tool_calls") == []:  # some servers write this for no calls
        del said["tool_calls"]
    if "tool_calls" in said:
        said["tool_calls"] = _calls(said["tool_calls"])
        said.setdefault("content", "")
    said = plain_message(said)
    said.setdefault("content", None)
    for name in _TEXTS:
        text = said.get(name, "")
        if not isinstance(text, str):
            raise InvalidRequest(f"`{name}` is {text!r:.80}, but must be a text", field=name)
        if not is_text(text):
            raise InvalidRequest(f"`{name}` {NO_TEXT}", field=name)
    return said


def _calls(calls: object) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as an object, as templates expect. In the OpenAI API they are JSON
    text.
    """
    if not isinstance(calls, list):
        raise InvalidRequest("`tool_calls` must be a list of calls", field="tool_calls")
    read = []
    for place, call in enumerate(calls):
        with inside(f"tool_calls[{place}]"):
            read.append(_call(call))
    return read


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidRequest("`tool_calls` has one without a `function` that has a `name`", field="function")
    check_fields(call, _CALL, "a tool call")
    with inside("function.arguments"):
        return {**call, "function": {**function, "arguments": read_arguments(name, function.get("arguments"))}}


def read_arguments(name: str, arguments: object) -> Mapping[str, Any]:
    """Return the arguments of a tool call as an object. Raises InvalidRequest."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = loaded(arguments)
        except ValueError as error:
            raise InvalidRequest(f"the `arguments` of the tool call {name!r:.80} are no JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest(f"the `arguments` of the tool call {name!r:.80} are nested too deeply") from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"the `arguments` of the tool call {name!r:.80} are {arguments!r:.40}, no object")
    return arguments
