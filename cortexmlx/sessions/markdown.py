"""A conversation as Markdown, for people to read."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.messages import plain_message
from cortexmlx.request import Message


def as_markdown(model: str, messages: Sequence[Message]) -> str:
    """Return a heading for each message, and its text unchanged."""
    parts = [f"# A conversation with {model}", *map(section, messages)]
    return "\n\n".join(parts) + "\n"


def section(message: Message) -> str:
    """Return one message: a heading, and its text."""
    text = str(plain_message(message).get("content") or "").strip()
    return "\n\n".join(part for part in (f"## {str(message['role']).capitalize()}", text) if part)
