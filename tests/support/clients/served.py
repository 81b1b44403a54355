"""Served: a server on this machine whose model writes what a script says, and everything that it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx import Engine, SamplingParams
from cortexmlx.protocols.request import RequestDefaults
from cortexmlx.server import ServerSettings, app
from cortexmlx.server.http import SCOPE_TOKENS
from cortexmlx.server.settings import RequestTokens
from support.clients.listening import listening
from support.clients.scripted import Answer, Script

MODEL = "local"
BLOCK = 16


@dataclass(frozen=True)
class Exchange:
    """One request, and its reply."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    """The JSON value; None if there was none."""
    status: int
    reply: str
    tokens: RequestTokens | None

    @property
    def computed(self) -> int:
        """How many tokens of the prompt were not in the cache."""
        assert self.tokens is not None, (self.status, self.reply[:1000])
        return self.tokens.prompt - self.tokens.cached


class Recorder:
    """An ASGI application that records the exchanges of another."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as the application does."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        asked, replied, status = bytearray(), bytearray(), 499
        messages: list[Any] = [await receive()]
        while messages[-1].get("more_body"):  # all of it, though the application may refuse it unread
            messages.append(await receive())
        asked.extend(b"".join(message.get("body", b"") for message in messages))

        async def heard() -> Any:
            return messages.pop(0) if messages else await receive()

        async def said(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            replied.extend(message.get("body", b""))
            await send(message)

        try:
            await self._application(scope, heard, said)
        finally:
            headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
            body = json.loads(asked) if asked else None
            text, tokens = replied.decode(), scope.get(SCOPE_TOKENS)
            made = Exchange(scope["method"], scope["path"], headers, body, status, text, tokens)
            self.exchanges.append(made)


@dataclass(frozen=True)
class Served:
    """A server."""

    url: str
    exchanges: list[Exchange]
    engine: Engine

    @property
    def refused(self) -> list[tuple[str, int, str]]:
        """The requests of a model that failed: path, status, and reply."""
        return [(one.path, one.status, one.reply) for one in self.exchanges if one.body and one.status >= 400]

    def turns(self, path: str) -> list[Exchange]:
        """The requests of a path that offer tools, in order: those of an agent's own turns."""
        return [one for one in self.exchanges if one.path == path and one.body and one.body.get("tools")]


@contextmanager
def served(folder: Path, answer: Answer, **options: Any) -> Iterator[Served]:
    """Serve the scripted model in a folder, under the name `MODEL`."""
    with Engine(str(folder), kv_memory="64MB", max_rows=4, block_size=BLOCK) as engine:
        params = SamplingParams(max_tokens=None, logits_processors=[Script(engine, answer)])
        settings = ServerSettings(names=(MODEL,), defaults=RequestDefaults(params), **options)
        recorder = Recorder(app(engine, settings))
        with listening(recorder) as url:
            yield Served(url, recorder.exchanges, engine)
