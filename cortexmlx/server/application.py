"""The ASGI application: which path asks what of the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.messages import meant
from cortexmlx.protocols.openai import chat_completions, completions, response_events, responses
from cortexmlx.protocols.reply import ReplyInfo
from cortexmlx.protocols.request import Request as Asked
from cortexmlx.server.access import CLIENT, Access
from cortexmlx.server.answering import Answering
from cortexmlx.server.http import EventStream, Refused, error_reply, event, gone, json_body, json_reply
from cortexmlx.server.logged import TOKENS, tokens_of
from cortexmlx.server.mailbox import Mailbox
from cortexmlx.server.request_log import RequestLog
from cortexmlx.server.settings import ServerSettings

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


class Protocol(NamedTuple):
    """How one path is read and written."""

    module: ModuleType
    chunks: Any
    named: bool
    """Whether the events of a stream have names, and nothing stands after the last."""


PROTOCOLS = {
    chat_completions.URL: Protocol(chat_completions, chat_completions.Chunks, named=False),
    completions.URL: Protocol(completions, completions.Chunks, named=False),
    responses.URL: Protocol(responses, response_events.Chunks, named=True),
}


def application(engine: Engine, settings: ServerSettings) -> Starlette:
    """Return the application of an engine."""
    server = _Server(engine, settings)
    routes = [
        *(Route(path, server.asked(protocol), methods=["POST"]) for path, protocol in PROTOCOLS.items()),
        Route("/v1/models", server.models, methods=["GET"]),
        Route("/v1/models/{name:path}", server.model, methods=["GET"]),
        Route("/tokenize", server.guarded(server.tokenize), methods=["POST"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/", server.root, methods=["GET"]),
    ]
    logging = [] if settings.log is None else [Middleware(RequestLog, write=settings.log)]
    made = Starlette(
        routes=routes,
        middleware=[*logging, Middleware(Access, settings=settings)],
        exception_handlers={404: server.missing, 405: server.missing, 500: server.failed},
    )
    made.state.server = server
    return made


class _Server:
    """What the requests of one server share."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.started = int(time.time())
        self.open = 0
        """Requests that are being answered."""
        self._mailbox: Mailbox | None = None

    # -- questions ----------------------------------------------------------------------------------------------------

    def asked(self, protocol: Protocol) -> Callable[[Request], Awaitable[Response]]:
        """Return what answers the requests of a protocol."""

        async def answer(request: Request) -> Response:
            body = await json_body(request, self.settings.max_body)
            self._check_name(body.get("model"))
            if self.open >= self.settings.max_open:
                later = {"retry-after": "1"}
                raise Refused(429, f"{self.open} requests run or wait: come again later", "overloaded", later)
            question: Asked = protocol.module.read(body, self.settings.defaults)
            if self._mailbox is None or self._mailbox.loop is not asyncio.get_running_loop():
                self._mailbox = Mailbox(asyncio.get_running_loop())
            answering = Answering(self.engine, self._mailbox, question)
            info = ReplyInfo(uuid.uuid4().hex, self._name, int(time.time()), self.engine.token_bytes)
            self.open += 1
            try:
                await answering.begin(request.scope.get(CLIENT), self.settings.timeout)
                if question.stream:
                    stream = self._stream(answering, protocol.chunks(question, info), protocol.named)
                    self.open += 1  # the stream's own
                    return EventStream(stream, lambda: self._ended(answering, request))
                answers = await self._whole(answering, request)
                request.scope[TOKENS] = tokens_of(answering.completions.values())
                return json_reply(protocol.module.write(question, answers, info))
            except BaseException:
                answering.close()
                raise
            finally:
                self.open -= 1

        return self.guarded(answer)

    def _ended(self, answering: Answering, request: Request) -> None:
        """End a stream, which may not have begun."""
        answering.close()
        request.scope[TOKENS] = tokens_of(answering.completions.values())
        self.open -= 1

    async def _whole(self, answering: Answering, request: Request) -> Any:
        """Return all answers. If the client goes away meanwhile, they are cancelled."""
        result, away = asyncio.ensure_future(answering.result()), asyncio.ensure_future(gone(request))
        try:
            await asyncio.wait((result, away), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ClientDisconnect
            return result.result()
        finally:
            for task in (result, away):
                task.cancel()
                with suppress(asyncio.CancelledError, CortexError):
                    await task

    async def _stream(self, answering: Answering, chunks: Any, named: bool) -> AsyncIterator[bytes]:
        async for item in answering.events(self.settings.quiet):
            if item is None:
                yield b": still here\n\n"
                continue
            number, said = item
            yield b"".join(event(body, body["type"] if named else None) for body in chunks.of(said, number))
            if said.error is not None:
                return
        if not named:
            yield b"data: [DONE]\n\n"

    async def tokenize(self, request: Request) -> Response:
        """Answer with the tokens of a text: llama.cpp's `/tokenize`, with `content`."""
        body = await json_body(request, self.settings.max_body)
        text = body.get("content", body.get("prompt"))
        if not isinstance(text, str):
            raise InvalidRequest("`content` must be a text", field="content")
        tokens = await asyncio.to_thread(self.engine.encode, text)
        return json_reply({"tokens": tokens, "count": len(tokens)})

    def guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the same, with errors as replies."""

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except CortexError as error:
                return error_reply(error)

        return guarded

    # -- the model ----------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        """The model's name, of a folder or a file without the path, which is nobody's business."""
        name = self.engine.info.name
        path = Path(name)
        return path.name.removesuffix(".gguf") if path.is_absolute() or path.exists() else name

    @property
    def _names(self) -> tuple[str, ...]:
        return (self._name, *self.settings.names)

    def _check_name(self, name: object) -> None:
        """Raise Refused for the name of another model. No name means the only model."""
        if name is None or self.settings.any_name or name in self._names:
            return
        if not isinstance(name, str):
            raise InvalidRequest(f"model is {name!r:.80}, but must be a text", field="model")
        known = ", ".join(map(repr, self._names))
        why = f"there is no model {name[:80]!r}{meant(name, self._names)}: this server has {known}"
        raise Refused(404, f"{why}. --alias gives it other names, --any-name all", "model_not_found")

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "cortexmlx",
            "context_length": self.engine.longest_request,
        }

    async def models(self, request: Request) -> Response:
        """List the model under all its names."""
        return json_reply({"object": "list", "data": [self._described(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        name = request.path_params["name"]
        try:
            self._check_name(name)
        except CortexError as error:
            return error_reply(error)
        return json_reply(self._described(name))

    # -- other paths --------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Say that the server runs."""
        return json_reply({"status": "ok"})

    async def root(self, request: Request) -> Response:
        """Say what this is."""
        return Response(f"cortexmlx: {self._name}\n", media_type="text/plain")

    async def missing(self, request: Request, error: Exception) -> Response:
        """Name the paths that there are."""
        paths = ", ".join([*PROTOCOLS, "/v1/models", "/tokenize", "/health"])
        status: int = getattr(error, "status_code", 404)
        why = "is not served" if status == 404 else f"does not take {request.method}"
        return error_reply(Refused(status, f"{request.url.path[:200]} {why}: there are {paths}"))

    async def failed(self, request: Request, error: Exception) -> Response:
        """Tell of a bug without its traceback, which is logged."""
        return error_reply(CortexError(f"unexpected {type(error).__name__}"))
