"""What a body asks: a text, token ids, a list of either, or messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cortexmlx.cli.batch.bodies.fields import unknown
from cortexmlx.cli.batch.bodies.request import Asked, Style
from cortexmlx.errors import InvalidRequest
from cortexmlx.request import Message, plain_message

_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content")
_ITEM = ("type", "role", "content", "id", "status", "phase")
_CALL = ("id", "type", "function", "index")
_MOST_PROMPTS = 2048


def prompts_of(said: Mapping[str, Any], style: Style) -> tuple[Asked, ...]:
    """The prompts of a body; more than one only for completions. Raises InvalidRequest for what is none."""
    if style is Style.RESPONSES:
        return (_input(said),)
    if style is not Style.COMPLETIONS and "messages" in said:
        if "prompt" in said:
            raise InvalidRequest("there are both `prompt` and `messages`: give one of them")
        return (messages_of(said["messages"]),)
    if style is Style.CHAT:
        raise InvalidRequest("`messages` is missing")
    prompt = said.get("prompt")
    if style is Style.COMPLETIONS and isinstance(prompt, list) and prompt and not _is_tokens(prompt):
        if len(prompt) > _MOST_PROMPTS:
            raise InvalidRequest(f"`prompt` is a list of {len(prompt)}, but must have {_MOST_PROMPTS} at most")
        return tuple(_prompt(each, "each of the list in `prompt`") for each in prompt)
    return (_prompt(prompt, "`prompt`" if style is Style.COMPLETIONS else "`prompt` or `messages`"),)


def messages_of(messages: Any) -> list[Message]:
    """The messages of a chat, as its template reads them."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("`messages` must be a list of objects with `role` and `content`")
    return [_message(m) for m in messages]


def checked(text: str) -> str:
    """The same text. Raises InvalidRequest if it is empty or none that can be written in UTF-8."""
    if not text:
        raise InvalidRequest("the prompt is empty")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise InvalidRequest("the prompt holds a NUL or half of a surrogate pair, which is no text")
    return text


def _prompt(prompt: Any, what: str) -> Asked:
    if isinstance(prompt, str):
        return checked(prompt)
    if isinstance(prompt, list) and _is_tokens(prompt):
        return prompt
    raise InvalidRequest(f"{what} must be one text or a list of token ids, not {type(prompt).__name__}")


def _is_tokens(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(t) is int for t in prompt)


def _message(message: dict[str, Any]) -> Message:
    """A message without what is null, its text in one piece. What developers say is what the system says."""
    said = {name: value for name, value in message.items() if value is not None}
    unknown(said, _MESSAGE, "a message")
    if not isinstance(said.get("role"), str):
        raise InvalidRequest("a message has no `role`")
    if "refusal" in said:
        raise InvalidRequest("a message's `refusal` is not served: templates know none. Put it into `content`")
    if said["role"] == "developer":
        said["role"] = "system"
    if "tool_calls" in said:
        said["tool_calls"] = _calls(said["tool_calls"])
        said.setdefault("content", "")
    said = plain_message(said)
    content = said.get("content")
    if not isinstance(content, str):
        raise InvalidRequest(f"a message's `content` must be text, not {type(content).__name__}")
    return {**said, "content": checked(content) if content else content}


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, as templates want them; the OpenAI API has them as JSON text."""
    if not isinstance(calls, list) or not calls:
        raise InvalidRequest("a message's `tool_calls` must be a list of calls")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("a message's `tool_calls` has one without a `function` that has a `name`")
    unknown(call, _CALL, "a tool call")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InvalidRequest(
                f"the `arguments` of the tool call {function['name']!r} are no JSON: {error}"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _input(said: Mapping[str, Any]) -> list[Message]:
    """The `input` of a response, after its `instructions`."""
    asked, instructions = said.get("input"), said.get("instructions")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": checked(asked)}]
    if not isinstance(asked, list) or not asked or not all(isinstance(item, dict) for item in asked):
        raise InvalidRequest("`input` must be a text or a list of messages")
    if not isinstance(instructions, str | None):
        raise InvalidRequest(f"`instructions` must be a text, not {type(instructions).__name__}")
    first: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
    return messages_of([*first, *map(_item, asked)])


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        raise InvalidRequest(f"an item of `input` of type {item['type']!r} is not served, only messages")
    unknown(item, _ITEM, "a message")
    return {name: item.get(name) for name in ("role", "content")}
