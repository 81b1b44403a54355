"""Conversations as others write and read them: messages of the OpenAI API in a file, and Markdown to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.messages import plain_message
from cortexmlx.protocols.openai.messages import read_messages
from cortexmlx.request import Message
from cortexmlx.sessions.saved import FORMAT

Exchanged = tuple[str | None, tuple[Message, ...]]
"""A system prompt, if there is one, and the messages behind it."""


def messages_in(path: Path, text: str) -> Exchanged | None:
    """The messages in the text of a file: a list of them, an object with `messages`, such as the body of a request, or
    JSONL with one message a line; None if it is nothing of that kind. Raises ConversationFileError for a bad message,
    by the rules of `read_messages`.
    """
    content = _parsed(text)
    if isinstance(content, Mapping) and content.get("format") != FORMAT:
        content = content.get("messages", [content] if "role" in content else None)
    if not isinstance(content, list) or not content:
        return None
    if all(isinstance(each, Mapping) and "messages" in each for each in content):
        if len(content) > 1:
            raise ConversationFileError(f"{path} has {len(content):,} conversations: keep one of them in a file")
        content = content[0]["messages"]
        if not isinstance(content, list) or not content:
            return None
    try:
        first, *others = read_messages(content)
    except InvalidRequest as error:
        raise ConversationFileError(f"{path}: {error}") from error
    if first["role"] == "system":
        return str(first["content"]), tuple(others)
    return None, (first, *others)


def _parsed(text: str) -> Any:
    """JSON, or a list of the JSON values in the lines; None if it is neither."""
    text = text.removeprefix("\ufeff")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]  # a text may have U+2028
    except (ValueError, RecursionError):
        return None


def as_markdown(model: str, messages: Sequence[Message]) -> str:
    """A heading for each message, and its text as it is."""
    parts = [f"# A conversation with {model}", *map(section, messages)]
    return "\n\n".join(parts) + "\n"


def section(message: Message) -> str:
    """Of one message."""
    text = str(plain_message(message).get("content") or "").strip()
    return "\n\n".join(part for part in (f"## {str(message['role']).capitalize()}", text) if part)
