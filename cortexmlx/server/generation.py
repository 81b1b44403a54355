"""Requests that generate text: a body becomes requests of an engine, and their events a reply or a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cortexmlx.core.event_loop import on_a_thread
from cortexmlx.core.prompt import Prompt
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols import responses
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.request import Defaults, ReplyInfo, is_tokens
from cortexmlx.protocols.request import Request as TextRequest
from cortexmlx.protocols.seal import Seal
from cortexmlx.server.http import (
    BODIES,
    BODY_BYTES,
    CLIENT,
    MODEL,
    TOKENS,
    Answer,
    EventStream,
    Places,
    by_size,
    error_for_client,
    event,
    json_body,
    json_reply,
    unless_gone,
    with_error_replies,
)
from cortexmlx.server.metrics import Tally
from cortexmlx.server.models import Lease, Models
from cortexmlx.server.settings import RequestTokens, ServerSettings
from cortexmlx.server.stored_responses import StoredResponses
from cortexmlx.server.transcripts import TranscriptReading, TranscriptTable, TranscriptTables
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, TokenEvent
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.engine import Engine


class ServedProtocol(NamedTuple):
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
    chat_completions.URL: ServedProtocol(chat_completions, chat_completions.ChatChunks),
    completions.URL: ServedProtocol(completions, completions.CompletionChunks),
    responses.URL: ServedProtocol(responses, responses.ResponseEvents, named=True),
    messages.URL: ServedProtocol(
        messages,
        messages.MessageEvents,
        named=True,
        ping=b'event: ping\ndata: {"type": "ping"}\n\n',
        id_header="request-id",
    ),
}


class GenerationEndpoints:
    """Answers the requests of all protocols."""

    def __init__(self, models: Models, settings: ServerSettings, tally: Tally) -> None:
        self.models = models
        self.settings = settings
        self.tally = tally
        clients = len(set(settings.keys.values()))
        self.places = Places(settings.max_open, clients, BODIES * settings.max_body)
        self.stored = StoredResponses(settings.stored_bytes, settings.stored_count, clients)
        self._mailbox: Mailbox | None = None
        self._tables = TranscriptTables(settings.transcripts, settings.transcripts_folder)

    @property
    def open(self) -> int:
        """How many requests are being read or answered."""
        return self.places.open

    def handler(self, protocol: ServedProtocol) -> Answer:
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

        return with_error_replies(answer)

    async def body(self, request: Request, held: ExitStack) -> dict[str, Any]:
        """Return the body of a request, which is counted as open until `held` ends. Raises RequestRefused if there are
        too many, before the body takes memory.
        """
        place = held.enter_context(self.places.take(request.scope.get(CLIENT, "")))
        most, seconds = self.settings.max_body, self.settings.body_seconds
        return await json_body(request, place, most, seconds)

    async def count_tokens(self, request: Request) -> Response:
        """Answer with how many tokens the prompt of a message would have."""
        with ExitStack() as held:
            body = await self.body(request, held)
            size, unknown = request.scope[BODY_BYTES], self._defaults(request)
            await by_size(size, lambda: messages.read_prompt(body, unknown))  # a wrong body loads no model
            lease = await self.models.take(body.get("model"), request)
            held.callback(lease.release)
            defaults = self._defaults(request, lease)
            asked: TextRequest = await by_size(size, lambda: messages.read_prompt(body, defaults))
            prompt: Any = asked.prompts[0]
            chat = ChatPrompt(prompt, asked.template_vars, asked.hints)
            tokens = await self._encode(lease, chat, asked.params)
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
            tokens = await self._encode(lease, text)
        return json_reply({"tokens": tokens, "count": len(tokens)})

    async def _answer(
        self,
        request: Request,
        protocol: ServedProtocol,
        body: dict[str, Any],
        lease: Lease,
        waited: float,
        held: ExitStack,
    ) -> Response:
        """Answer with a model, for which the request waited so many seconds. A stream keeps what is `held` until its
        end.
        """
        client, defaults = request.scope.get(CLIENT), self._defaults(request, lease)
        question: TextRequest = await by_size(request.scope[BODY_BYTES], lambda: protocol.module.read(body, defaults))
        if self._mailbox is None or self._mailbox.loop is not asyncio.get_running_loop():
            self._mailbox = Mailbox(asyncio.get_running_loop())
        table = self._tables.of(lease.engine.info.identity)
        answers = RequestAnswers(lease.engine, self._mailbox, question, table, lease.adapter)
        info = ReplyInfo(
            uuid.uuid4().hex,
            lease.name,
            int(time.time()),
            lease.engine.token_bytes,
            seal=defaults.seal,
            keep=self.stored.of(client).keep,
            progress=answers.progress,
        )
        headers = {} if protocol.id_header is None else {protocol.id_header: f"req_{info.id}"}

        def finish() -> None:
            answers.close()
            request.scope[TOKENS] = _count_tokens(answers.completions.values())
            self.tally.count_answers(lease.name, answers.completions.values(), answers.failed, answers.cancelled)

        held.callback(finish)
        timeout = self.settings.timeout
        await answers.submit(client, None if timeout is None else max(timeout - waited, 0.001))
        if question.stream:
            stream = self._stream(answers, protocol, protocol.chunks(question, info))
            return EventStream(stream, held.pop_all().close, headers)
        completions = await unless_gone(request, answers.result())
        return json_reply(protocol.module.write(question, completions, info), headers=headers)

    @staticmethod
    async def _encode(lease: Lease, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
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

    async def _stream(self, answers: RequestAnswers, protocol: ServedProtocol, chunks: Any) -> AsyncIterator[bytes]:
        def as_bytes(said: TokenEvent, number: int = 0) -> bytes:
            return b"".join(event(body, body["type"] if protocol.named else None) for body in chunks.of(said, number))

        try:
            async for item in answers.events(self.settings.quiet):
                if item is None:
                    yield protocol.ping
                    continue
                number, said = item
                yield as_bytes(said, number)
                if said.error is not None:
                    return
        except BaseException as error:
            if (why := error_for_client(error)) is None or answers.closed:
                raise
            yield as_bytes(TokenEvent("", error=why))
            return
        if not protocol.named:
            yield b"data: [DONE]\n\n"


# The answers of one request: submitted, read as events, and cancelled when nobody reads them any more.


MOST_WAITING = 4096
"""Events of one request that may wait for a slow reader. With one more, the request is cancelled."""


class SlowReader(CortexError):
    """A client reads its stream so slowly that too much of it is waiting."""


class RequestAnswers:
    """The answers to the prompts of one request."""

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        request: TextRequest,
        transcripts: TranscriptTable | None = None,
        adapter: str | None = None,
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._transcripts = transcripts
        self._mailbox = mailbox
        self._request = request
        self._handles: list[RequestHandle] = []
        self._events: deque[tuple[int, TokenEvent]] = deque()
        self._news = asyncio.Event()
        self.closed = False
        """Whether nobody reads what comes."""
        self.completions: dict[int, Completion] = {}
        """The completions so far, by the numbers of their prompts."""
        self.failed = 0
        """How many prompts ended with an error."""

    async def submit(self, client: str | None, timeout: float | None) -> None:
        """Submit all prompts. They are tokenized on a thread. Raises what `Engine.submit` raises."""
        await on_a_thread(lambda: self._submit(client, timeout), lambda done: self.close())

    def _submit(self, client: str | None, timeout: float | None) -> None:
        for number, asked in enumerate(self._request.prompts):
            prompt: Any = asked
            reading = None
            if not isinstance(asked, str) and not is_tokens(asked):
                if self._transcripts is not None:
                    reading = TranscriptReading(self._transcripts, client or "", prompt, self._request.params)
                    prompt = reading.messages
                prompt = ChatPrompt(prompt, self._request.template_vars, self._request.hints, reading)
            listener = self._listener(number, reading)
            self._handles.append(
                self._engine.submit(
                    prompt,
                    self._request.params,
                    listener=listener,
                    client=client,
                    timeout=timeout,
                    adapter=self._adapter,
                )
            )

    def _listener(self, number: int, reading: TranscriptReading | None) -> Any:
        def deliver(event: TokenEvent) -> None:
            if event.completion is not None and reading is not None:
                reading.remember(event.completion)
            if self.closed:
                return
            self._events.append((number, event))
            self._news.set()
            if len(self._events) > MOST_WAITING:
                why = f"more than {MOST_WAITING} events wait to be read: the request is cancelled"
                self._events.append((number, TokenEvent("", error=SlowReader(why))))
                self.close()

        return lambda event: self._mailbox.put(deliver, event)

    async def events(self, quiet: float) -> AsyncIterator[tuple[int, TokenEvent] | None]:
        """Yield each event with the number of its prompt, up to the last completion or the first error, which may be
        a SlowReader. Yield None whenever nothing has come for `quiet` seconds. After `close` it ends.
        """
        while len(self.completions) < len(self._request.prompts):
            if not self._events:
                if self.closed:
                    return
                self._news.clear()
                alarm = asyncio.get_running_loop().call_later(quiet, self._news.set)  # without a task for each event
                try:
                    await self._news.wait()
                finally:
                    alarm.cancel()
                if not self._events and not self.closed:
                    yield None
                continue
            number, event = self._events.popleft()
            if event.completion is not None:
                self.completions[number] = event.completion
            self.failed += event.error is not None
            yield number, event
            if event.error is not None:
                return

    @property
    def cancelled(self) -> int:
        """How many prompts have no answer: nobody waited for it, or another prompt's error ended the request."""
        return len(self._handles) - len(self.completions) - self.failed

    def progress(self) -> Progress | None:
        """Return how far the first prompt is; None if it has not begun."""
        return self._handles[0].progress if self._handles else None

    async def result(self) -> list[tuple[Completion, ...]]:
        """Return all answers to each prompt. Raises the error of the first prompt that fails."""
        async for item in self.events(3600.0):
            if item is not None and item[1].error is not None:
                raise item[1].error
        return [(done, *done.others) for _, done in sorted(self.completions.items())]

    def close(self) -> None:
        """Cancel what has not ended. Safe to call again, and from other threads."""
        self.closed = True
        for handle in self._handles:
            handle.cancel()


Deliver = Callable[[TokenEvent], None]


class Mailbox:
    """Hands events from the engine's thread to an event loop. The engine never waits for the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Deliver, TokenEvent]] = deque()
        self._woken = False
        self.wakeups = 0
        """How often the loop was woken."""

    def put(self, deliver: Deliver, event: TokenEvent) -> None:
        """Have the loop call `deliver(event)`. Called on the engine's thread."""
        self._waiting.append((deliver, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # before the first event is taken: what is put after that wakes the loop again
        self.wakeups += 1
        while self._waiting:
            deliver, event = self._waiting.popleft()
            deliver(event)


def _count_tokens(completions: Iterable[Completion]) -> RequestTokens | None:
    """Return the tokens of the answers to all prompts of a request; None if there are no answers."""
    listed = list(completions)
    if not listed:
        return None
    answers = [answer for first in listed for answer in (first, *first.others)]
    return RequestTokens(
        sum(first.usage.prompt_tokens for first in listed),
        sum(first.usage.cached_tokens for first in listed),
        sum(answer.usage.completion_tokens for answer in answers),
    )
