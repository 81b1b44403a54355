"""A line for each request: what was asked, the status, the time, and the tokens. Never a key, and never a text."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortexmlx.server.web.logged import MODEL, TOKENS, Logged, path_in


class RequestLog:
    """An ASGI middleware that hands each request to `write` when it has ended, with its path inside the application."""

    def __init__(self, app: ASGIApp, write: Callable[[Logged, str], None]) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, ended = time.perf_counter(), 499, False

        async def also(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, also)
        finally:
            seconds = time.perf_counter() - started
            path, inside, shown = scope["path"][:200], path_in(scope), status if ended else 499
            logged = Logged(scope["method"], path, shown, seconds, scope.get(TOKENS), scope.get(MODEL))
            self._write(logged, inside)
