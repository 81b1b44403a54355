"""Asking: a body becomes requests of an engine, and their events a reply or a stream."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cortexmlx.core.event_loop import on_a_thread
from cortexmlx.core.prompt import Prompt
from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.request import Defaults, ReplyInfo
from cortexmlx.protocols.request import Request as Asked
from cortexmlx.protocols.seal import Seal
from cortexmlx.server.access import CLIENT
from cortexmlx.server.answering import Answering, Mailbox
from cortexmlx.server.http import (
    BODY_BYTES,
    EventStream,
    by_size,
    error_reply,
    event,
    json_body,
    json_reply,
    unless_gone,
)
from cortexmlx.server.metrics import Tally
from cortexmlx.server.models import Lease, Models
from cortexmlx.server.places import BODIES, Places
from cortexmlx.server.protocols import Protocol
from cortexmlx.server.request_log import MODEL, TOKENS, tokens_of
from cortexmlx.server.settings import ServerSettings
from cortexmlx.server.stored import StoredResponses
from cortexmlx.server.transcripts import Tables
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.request import TokenEvent
from cortexmlx.types.sampling_params import SamplingParams

log = logging.getLogger("cortexmlx")

Answer = Callable[[Request], Awaitable[Response]]


class Asking:
    """Answers the requests of all protocols."""

    def __init__(self, models: Models, settings: ServerSettings, tally: Tally) -> None:
        self.models = models
        self.settings = settings
        self.tally = tally
        clients = len(set(settings.keys.values()))
        self.places = Places(settings.max_open, clients, BODIES * settings.max_body)
        self.stored = StoredResponses(settings.stored_bytes, settings.stored_count, clients)
        self._mailbox: Mailbox | None = None
        self._tables = Tables(settings.transcripts, settings.transcripts_folder)

    @property
    def open(self) -> int:
        """How many requests are being read or answered."""
        return self.places.open

    def asked(self, protocol: Protocol) -> Answer:
        """Return what answers the requests of a protocol."""

        async def answer(request: Request) -> Response:
            with ExitStack() as held:
                body = await self.body(request, held)
                began, name = time.monotonic(), body.get("model")
                if not self.models.is_ready(name):  # a wrong body loads no model
                    defaults = self._defaults(request)
                    await by_size(request.scope[BODY_BYTES], lambda: protocol.module.read(body, defaults))
                lease = await self.models.take(name, request)
                held.callback(lease.release)
                request.scope[MODEL] = lease.name
                return await self._answer(request, protocol, body, lease, time.monotonic() - began, held)

        return guarded(answer)

    async def body(self, request: Request, held: ExitStack) -> dict[str, Any]:
        """Return the body of a request, which is counted as open until `held` ends. Raises Refused if there are too
        many, before the body takes memory.
        """
        place = held.enter_context(self.places.take(request.scope.get(CLIENT, "")))
        most, seconds = self.settings.max_body, self.settings.body_seconds
        return await json_body(request, most, seconds, place.while_it_arrives, place.hold)

    async def count_tokens(self, request: Request) -> Response:
        """Answer with how many tokens the prompt of a message would have."""
        with ExitStack() as held:
            body = await self.body(request, held)
            size, unknown = request.scope[BODY_BYTES], self._defaults(request)
            await by_size(size, lambda: messages.read_prompt(body, unknown))  # a wrong body loads no model
            lease = await self.models.take(body.get("model"), request)
            held.callback(lease.release)
            defaults = self._defaults(request, lease)
            asked: Asked = await by_size(size, lambda: messages.read_prompt(body, defaults))
            prompt: Any = asked.prompts[0]
            chat = ChatPrompt(prompt, asked.template_vars, asked.hints)
            tokens = await self._tokens(lease, chat, asked.params)
        return json_reply({"input_tokens": len(tokens)}, headers={"request-id": f"req_{uuid.uuid4().hex}"})

    async def tokenize(self, request: Request) -> Response:
        """Answer with the tokens of a text: llama.cpp's `/tokenize`, with `content`."""
        with ExitStack() as held:
            body = await self.body(request, held)
            text = body.get("content", body.get("prompt"))
            if not isinstance(text, str):
                raise InvalidRequest("`content` must be a text", field="content")
            lease = await self.models.take(body.get("model"), request)
            held.callback(lease.release)
            tokens = await self._tokens(lease, text)
        return json_reply({"tokens": tokens, "count": len(tokens)})

    async def _answer(
        self,
        request: Request,
        protocol: Protocol,
        body: dict[str, Any],
        lease: Lease,
        waited: float,
        held: ExitStack,
    ) -> Response:
        """Answer with a model, for which the request waited so many seconds. A stream keeps what is `held` until its
        end.
        """
        client, defaults = request.scope.get(CLIENT), self._defaults(request, lease)
        question: Asked = await by_size(request.scope[BODY_BYTES], lambda: protocol.module.read(body, defaults))
        if self._mailbox is None or self._mailbox.loop is not asyncio.get_running_loop():
            self._mailbox = Mailbox(asyncio.get_running_loop())
        table = self._tables.of(lease.engine.info.identity)
        answering = Answering(lease.engine, self._mailbox, question, table, lease.adapter)
        info = ReplyInfo(
            uuid.uuid4().hex,
            lease.name,
            int(time.time()),
            lease.engine.token_bytes,
            seal=defaults.seal,
            keep=self.stored.of(client).keep,
            progress=answering.progress,
        )
        headers = {} if protocol.id_header is None else {protocol.id_header: f"req_{info.id}"}

        def ended() -> None:
            answering.close()
            request.scope[TOKENS] = tokens_of(answering.completions.values())
            self.tally.answered(lease.name, answering)

        held.callback(ended)
        timeout = self.settings.timeout
        await answering.begin(client, None if timeout is None else max(timeout - waited, 0.001))
        if question.stream:
            stream = self._stream(answering, protocol, protocol.chunks(question, info))
            return EventStream(stream, held.pop_all().close, headers)
        answers = await unless_gone(request, answering.result())
        return json_reply(protocol.module.write(question, answers, info), headers=headers)

    @staticmethod
    async def _tokens(lease: Lease, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
        """Return the tokens of a prompt. A text that surely is too long for a request is refused, as requests are."""
        return await on_a_thread(lambda: lease.engine.encode(prompt, params, fitting=True), interruptible=True)

    def _defaults(self, request: Request, lease: Lease | None = None) -> Defaults:
        """Return what a body of this client does not set, with what it may refer to. Without a lease, nothing is known
        of the model.
        """
        client = request.scope.get(CLIENT)
        usual = self.settings.defaults if lease is None or lease.defaults is None else lease.defaults
        known = None if lease is None else lease.engine.info.known_vars
        seal = Seal(self.settings.secret, client or "")
        return replace(usual, seal=seal, earlier=self.stored.of(client), known_vars=known)

    async def _stream(self, answering: Answering, protocol: Protocol, chunks: Any) -> AsyncIterator[bytes]:
        def told(said: TokenEvent, number: int = 0) -> bytes:
            return b"".join(event(body, body["type"] if protocol.named else None) for body in chunks.of(said, number))

        try:
            async for item in answering.events(self.settings.quiet):
                if item is None:
                    yield protocol.ping
                    continue
                number, said = item
                yield told(said, number)
                if said.error is not None:
                    return
        except BaseException as error:
            if (why := _in_words(error)) is None or answering.closed:
                raise
            yield told(TokenEvent("", error=why))
            return
        if not protocol.named:
            yield b"data: [DONE]\n\n"


def guarded(answer: Answer) -> Answer:
    """Return the same, with errors as replies in the protocol of the path."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except BaseException as error:
            if (why := _in_words(error)) is None:
                raise
            return error_reply(why, request.url.path)

    return guarded


def _in_words(error: BaseException) -> CortexError | None:
    """Return what a client is told of an error; None: nothing, since nobody listens any more. A task is cancelled when
    the server ends and the time for running requests is over. Bugs are logged, and so are panics of libraries, which
    are no subclass of Exception. What is returned has no traceback, whose frames would keep the body of the request.
    """
    if isinstance(error, CortexError):
        return error.with_traceback(None)
    if isinstance(error, asyncio.CancelledError):
        return EngineClosed("the server ends: ask again when it is back, or another one")
    if isinstance(error, GeneratorExit | KeyboardInterrupt | SystemExit):
        return None
    log.error("a request failed: unexpected %s", type(error).__name__, exc_info=error)
    return CortexError("an unexpected error, which the server's log tells")
