"""The protocols that a server speaks, by their paths."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from cortexmlx.protocols import responses
from cortexmlx.protocols.anthropic import message_events, messages
from cortexmlx.protocols.openai import chat_completions, completions


class Protocol(NamedTuple):
    """How the requests of one path are read, and their answers written."""

    module: ModuleType
    """It has `read` and `write`."""
    chunks: Any
    """The class that makes the chunks of a stream."""
    named: bool = False
    """Whether the events of a stream have names, and nothing stands after the last."""
    ping: bytes = b": still here\n\n"
    """What a silent stream says, so that clients do not give up."""
    id_header: str | None = None
    """The header of a reply with the id of its request."""


PROTOCOLS = {
    chat_completions.URL: Protocol(chat_completions, chat_completions.Chunks),
    completions.URL: Protocol(completions, completions.Chunks),
    responses.URL: Protocol(responses, responses.Chunks, named=True),
    messages.URL: Protocol(
        messages,
        message_events.Chunks,
        named=True,
        ping=b'event: ping\ndata: {"type": "ping"}\n\n',
        id_header="request-id",
    ),
}
