"""Logged: a request that was answered, as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortexmlx.types.request import Completion

TOKENS = "cortexmlx.tokens"
"""The tokens of a request's answers, in its scope."""

MODEL = "cortexmlx.model"
"""The name of the model that answers, in the scope of a request."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one request."""

    prompt: int
    cached: int
    answer: int


@dataclass(frozen=True)
class Logged:
    """A request that was answered."""

    method: str
    path: str
    status: int
    """499: the client went away before the answer."""
    seconds: float
    tokens: Tokens | None
    model: str | None = None
    """The model that answered; None: none was asked."""


def path_in(scope: Mapping[str, Any]) -> str:
    """Return the path of a request inside the application, which may be mounted in another one."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def tokens_of(completions: Iterable[Completion]) -> Tokens | None:
    """Return the tokens of the answers to all prompts of a request; None if there are no answers."""
    listed = list(completions)
    if not listed:
        return None
    answers = [answer for first in listed for answer in (first, *first.others)]
    return Tokens(
        sum(first.usage.prompt_tokens for first in listed),
        sum(first.usage.cached_tokens for first in listed),
        sum(answer.usage.completion_tokens for answer in answers),
    )


# A line for each request: what was asked, the status, the time, and the tokens. Never a key, and never a text.


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
