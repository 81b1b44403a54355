"""What a body asks: a text, token ids, a list of either, or messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import NO_TEXT, is_text
from cortexmlx.protocols.fields import check_fields
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.protocols.request import Asked, Style
from cortexmlx.request import Message

_ITEM = ("type", "role", "content", "id", "status", "phase")
_MOST_PROMPTS = 2048


def prompts_of(said: Mapping[str, Any], style: Style) -> tuple[Asked, ...]:
    """The prompts of a body; more than one only for completions. Raises InvalidRequest for what is none."""
    if style is Style.RESPONSES:
        return (_input(said),)
    if style is not Style.COMPLETIONS and "messages" in said:
        if "prompt" in said:
            raise InvalidRequest("there are both `prompt` and `messages`: give one of them")
        return (read_messages(said["messages"]),)
    if style is Style.CHAT:
        raise InvalidRequest("`messages` is missing")
    prompt = said.get("prompt")
    if style is Style.COMPLETIONS and isinstance(prompt, list) and prompt and not _is_tokens(prompt):
        if len(prompt) > _MOST_PROMPTS:
            raise InvalidRequest(f"`prompt` is a list of {len(prompt)}, but must have {_MOST_PROMPTS} at most")
        return tuple(_prompt(each, "each of the list in `prompt`") for each in prompt)
    return (_prompt(prompt, "`prompt`" if style is Style.COMPLETIONS else "`prompt` or `messages`"),)


def checked(text: str) -> str:
    """The same text. Raises InvalidRequest if it is empty or none that can be written in UTF-8."""
    if not text:
        raise InvalidRequest("the prompt is empty")
    if not is_text(text):
        raise InvalidRequest(f"the prompt {NO_TEXT}")
    return text


def _prompt(prompt: Any, what: str) -> Asked:
    if isinstance(prompt, str):
        return checked(prompt)
    if isinstance(prompt, list) and _is_tokens(prompt):
        return prompt
    raise InvalidRequest(f"{what} must be one text or a list of token ids, not {type(prompt).__name__}")


def _is_tokens(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(t) is int for t in prompt)


def _input(said: Mapping[str, Any]) -> list[Message]:
    """The `input` of a response, after its `instructions`."""
    asked, instructions = said.get("input"), said.get("instructions")
    if isinstance(asked, str):
        asked = [{"role": "user", "content": checked(asked)}]
    if not isinstance(asked, list) or not asked or not all(isinstance(item, dict) for item in asked):
        raise InvalidRequest("`input` must be a text or a list of messages")
    if not isinstance(instructions, str | None):
        raise InvalidRequest(f"`instructions` must be a text, not {type(instructions).__name__}")
    first: list[Message] = [{"role": "system", "content": checked(instructions)}] if instructions else []
    return [*first, *read_messages(_messages(asked))]


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages among the items, those of an assistant with the thoughts that stand before them."""
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items:
        if item.get("type") == "reasoning":
            thoughts.append(_thought(item))
            continue
        message = _item(item)
        if thoughts and message["role"] != "assistant":
            break
        messages.append({**message, "reasoning_content": "".join(thoughts)} if thoughts else message)
        thoughts = []
    if thoughts:
        raise InvalidRequest("an item of `input` of type 'reasoning' is served only before an assistant's message")
    return messages


def _thought(item: dict[str, Any]) -> str:
    parts = item.get("content")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else []
    thought = "".join(text for text in texts if isinstance(text, str))
    if not thought or None in texts or item.get("summary"):
        raise InvalidRequest("an item of `input` of type 'reasoning' is served only with its text as `content` alone")
    return thought


def _item(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        raise InvalidRequest(f"an item of `input` of type {item['type']!r} is not served, only messages")
    check_fields(item, _ITEM, "a message")
    return {name: item.get(name) for name in ("role", "content")}
