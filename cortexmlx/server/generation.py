"""HTTP endpoints that generate text: parse the body, submit its prompts to an engine, and reply whole or as a
stream.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from cortexmlx.core.blocking_calls import run_on_thread
from cortexmlx.core.prompt import Prompt
from cortexmlx.core.prompt_history import PromptHistory
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols import responses
from cortexmlx.protocols.anthropic import messages
from cortexmlx.protocols.ollama import chat as ollama_chat
from cortexmlx.protocols.ollama import generate as ollama_generate
from cortexmlx.protocols.openai import chat_completions, completions
from cortexmlx.protocols.openai.parameters import name_field_as_sent
from cortexmlx.protocols.request import ReplyInfo, RequestDefaults, is_token_list
from cortexmlx.protocols.request import Request as TextRequest
from cortexmlx.protocols.seal import Seal
from cortexmlx.server.http import (
    LINES_TYPE,
    MAX_FULL_BODIES,
    SCOPE_BODY_BYTES,
    SCOPE_CLIENT,
    SCOPE_CUT,
    SCOPE_MODEL,
    SCOPE_TOKENS,
    EventStream,
    RequestHandler,
    RequestLimiter,
    error_for_client,
    json_line,
    json_reply,
    read_json_body,
    run_by_size,
    run_until_disconnect,
    server_sent_event,
    with_error_replies,
)
from cortexmlx.server.metrics import ServerCounters
from cortexmlx.server.models import ModelDirectory, ModelLease
from cortexmlx.server.settings import RequestTokens, ServerSettings
from cortexmlx.server.stored_responses import StoredResponses
from cortexmlx.server.transcripts import TranscriptMemory, TranscriptTable, TranscriptTables
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, TokenEvent
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.engine import Engine


class ServedProtocol(NamedTuple):
    """The protocol of one URL path: the module that reads bodies and writes replies, and how its streams look."""

    module: ModuleType
    """It has `read` and `write`."""
    stream_class: Any
    """The class that makes the chunks of a stream."""
    named_events: bool = False
    """Whether the events of a stream have names, and nothing stands after the last."""
    lines: bool = False
    """Whether a stream is lines of JSON instead of server-sent events."""
    ping: bytes | None = b": still here\n\n"
    """What a silent stream says, so that clients do not give up. None: what its `stream_class` says with `ping`."""
    id_header: str | None = None
    """The header of a reply with the id of its request."""


PROTOCOLS = {
    chat_completions.URL: ServedProtocol(chat_completions, chat_completions.ChatChunks),
    completions.URL: ServedProtocol(completions, completions.CompletionChunks),
    responses.URL: ServedProtocol(responses, responses.ResponseEvents, named_events=True),
    messages.URL: ServedProtocol(
        messages,
        messages.MessageEvents,
        named_events=True,
        ping=b'event: ping\ndata: {"type": "ping"}\n\n',
        id_header="request-id",
    ),
    ollama_chat.URL: ServedProtocol(ollama_chat, ollama_chat.ChatLines, lines=True, ping=None),
    ollama_generate.URL: ServedProtocol(ollama_generate, ollama_generate.GenerateLines, lines=True, ping=None),
}


class GenerationEndpoints:
    """The HTTP endpoints that generate text or count tokens, for all protocols."""

    def __init__(self, models: ModelDirectory, settings: ServerSettings, tally: ServerCounters) -> None:
        self.models = models
        self.settings = settings
        self.tally = tally
        clients = len(set(settings.keys.values()))
        self.request_limiter = RequestLimiter(settings.max_open, clients, MAX_FULL_BODIES * settings.max_body)
        self.stored_responses = StoredResponses(settings.stored_bytes, settings.stored_count, clients)
        self.history = PromptHistory()
        """What is known of each client's prompts, whichever model read them."""
        self._mailbox: EventMailbox | None = None
        self._tables = TranscriptTables(settings.transcripts, settings.transcripts_folder)

    def handler(self, protocol: ServedProtocol) -> RequestHandler:
        """Return the request handler of a protocol's path."""

        async def answer(request: Request) -> Response:
            with ExitStack() as exit_stack:
                body = await self.read_body(request, exit_stack)
                start_time, name = time.monotonic(), body.get("model")
                if not self.models.is_ready(name):  # what is wrong without a look at its images loads no model
                    defaults = self._request_defaults(request)
                    await self._parse_request(request, defaults, lambda: protocol.module.read(body, defaults))
                lease = await self.models.acquire(name, request)
                exit_stack.callback(lease.release)
                request.scope[SCOPE_MODEL] = lease.name
                return await self._generate(request, protocol, body, lease, time.monotonic() - start_time, exit_stack)

        return with_error_replies(answer)

    async def read_body(self, request: Request, exit_stack: ExitStack) -> dict[str, Any]:
        """Read a request's JSON body. The request counts as open until `exit_stack` is closed. Raises RequestRefused if
        too many requests are open, before the body takes memory.
        """
        permit = exit_stack.enter_context(self.request_limiter.acquire(request.scope.get(SCOPE_CLIENT, "")))
        max_bytes, seconds = self.settings.max_body, self.settings.body_seconds
        return await read_json_body(request, permit, max_bytes, seconds)

    async def count_tokens(self, request: Request) -> Response:
        """Handle POST `/v1/messages/count_tokens`: return the number of tokens of a message's prompt."""
        with ExitStack() as exit_stack:
            body = await self.read_body(request, exit_stack)
            general = self._request_defaults(request)  # a wrong body loads no model
            await self._parse_request(request, general, lambda: messages.read_for_counting(body, general))
            lease = await self.models.acquire(body.get("model"), request)
            exit_stack.callback(lease.release)
            defaults = self._request_defaults(request, lease)
            text_request: TextRequest = await self._parse_request(
                request, defaults, lambda: messages.read_for_counting(body, defaults)
            )
            prompt: Any = text_request.prompts[0]
            chat = ChatPrompt(prompt, text_request.template_vars, text_request.hints)
            tokens = await self._tokenize_prompt(request, lease, chat, text_request.params)
        return json_reply({"input_tokens": len(tokens)}, headers={"request-id": f"req_{uuid.uuid4().hex}"})

    async def tokenize(self, request: Request) -> Response:
        """Handle POST `/tokenize`, as llama.cpp has it: return the tokens of the text `content`."""
        with ExitStack() as exit_stack:
            body = await self.read_body(request, exit_stack)
            text = body.get("content", body.get("prompt"))
            if not isinstance(text, str):
                raise InvalidRequest("`content` must be a text", field="content")
            lease = await self.models.acquire(body.get("model"), request)
            exit_stack.callback(lease.release)
            tokens = await self._tokenize_prompt(request, lease, text)
        return json_reply({"tokens": tokens, "count": len(tokens)})

    async def explain_cache(self, request: Request) -> Response:
        """Handle GET `/cache/why`: return how much of each of this client's last prompts was cached, and why."""
        reports = self.history.reports(request.scope.get(SCOPE_CLIENT))
        body = {"reports": [{**asdict(report), "text": str(report)} for report in reports]}
        return json_reply(body, headers={"cache-control": "no-store"})

    async def _generate(
        self,
        request: Request,
        protocol: ServedProtocol,
        body: dict[str, Any],
        lease: ModelLease,
        waited_seconds: float,
        exit_stack: ExitStack,
    ) -> Response:
        """Submit the request to the leased model and return its reply or stream. `waited_seconds`: the seconds that it
        waited for the model; `exit_stack` is closed when a stream ends.
        """
        client, defaults = request.scope.get(SCOPE_CLIENT), self._request_defaults(request, lease)
        text_request: TextRequest = await self._parse_request(
            request, defaults, lambda: protocol.module.read(body, defaults)
        )
        if self._mailbox is None or self._mailbox.loop is not asyncio.get_running_loop():
            self._mailbox = EventMailbox(asyncio.get_running_loop())
        lease.engine.share_history(self.history)
        table = self._tables.for_model(lease.engine.info.identity)
        answers = HttpRequestAnswers(lease.engine, self._mailbox, text_request, table, lease.adapter)
        info = ReplyInfo(
            uuid.uuid4().hex,
            lease.name,
            int(time.time()),
            lease.engine.token_bytes,
            seal=defaults.seal,
            keep=self.stored_responses.for_client(client).store,
            load_seconds=waited_seconds,
            progress=answers.progress,
        )
        headers = {} if protocol.id_header is None else {protocol.id_header: f"req_{info.id}"}
        if not text_request.prompts:  # the model was only to be loaded
            return json_reply(protocol.module.write(text_request, [], info), headers=headers)

        def finish_request() -> None:
            answers.close()
            request.scope[SCOPE_TOKENS] = _sum_tokens(answers.completions.values())
            self.tally.count_answers(
                lease.name, answers.completions.values(), answers.failed_count, answers.cancelled_count
            )

        exit_stack.callback(finish_request)
        if (timeout := self.settings.timeout) is not None:  # in tenths of a second, as an error names it
            timeout = max(min(timeout, math.ceil(10 * (timeout - waited_seconds)) / 10), 0.001)
        async with self._body_semaphore(request):
            await answers.submit(client, timeout)
        if text_request.stream:
            stream = self._stream_events(request, answers, protocol, protocol.stream_class(text_request, info))
            media_type = LINES_TYPE if protocol.lines else "text/event-stream"
            return EventStream(stream, exit_stack.pop_all().close, headers, media_type)
        completions = await run_until_disconnect(request, answers.wait_for_answers())
        params = text_request.params
        size = 0 if params.logprobs is params.prompt_logprobs is None else sys.maxsize  # log-probabilities are many
        return await run_by_size(
            size, lambda: json_reply(protocol.module.write(text_request, completions, info), headers=headers)
        )

    async def _tokenize_prompt(
        self, request: Request, lease: ModelLease, prompt: Prompt, params: SamplingParams | None = None
    ) -> list[int]:
        """Return the tokens of a prompt. A text that surely is too long for a request is refused first."""
        async with self._body_semaphore(request):
            return await run_on_thread(lambda: lease.engine.encode(prompt, params, fitting=True), interruptible=True)

    async def _parse_request(
        self, request: Request, defaults: RequestDefaults, read: Callable[[], TextRequest]
    ) -> TextRequest:
        """Read a body into a request: at once if it is small, or else on a thread. It is always a thread for a model
        that sees images, which may be large in a small file, and for a body that names stored responses.
        """
        sees = defaults.check_image is not None
        size = sys.maxsize if sees or defaults.earlier_responses else request.scope[SCOPE_BODY_BYTES]
        async with self._body_semaphore(request, sees):
            return await run_by_size(size, read)

    def _body_semaphore(self, request: Request, with_images: bool = False) -> asyncio.Semaphore:
        return self.request_limiter.body_semaphore(request.scope.get(SCOPE_CLIENT, ""), with_images)

    def _request_defaults(self, request: Request, lease: ModelLease | None = None) -> RequestDefaults:
        """Return the defaults for a client's body: the leased model's, if any, with the client's seal and responses."""
        client = request.scope.get(SCOPE_CLIENT)
        defaults = self.settings.defaults if lease is None or lease.defaults is None else lease.defaults
        known_vars = None if lease is None else lease.engine.info.known_vars
        return replace(
            defaults,
            seal=Seal(self.settings.secret, client or ""),
            earlier_responses=self.stored_responses.for_client(client),
            known_vars=known_vars,
            check_image=lease.engine.check_image if lease is not None and lease.engine.sees_images else None,
            read_elsewhere=self.settings.read_elsewhere,
        )

    async def _stream_events(
        self, request: Request, answers: HttpRequestAnswers, protocol: ServedProtocol, chunks: Any
    ) -> AsyncIterator[bytes]:
        """Yield the bytes of a streamed reply: the protocol's events, errors, and a ping whenever nothing was sent for
        `quiet` seconds. Many engine events send nothing: progress, text that may begin a stop string, unfinished calls.
        """

        def encode_body(body: dict[str, Any]) -> bytes:
            if protocol.lines:
                return json_line(body)
            return server_sent_event(body, body["type"] if protocol.named_events else None)

        def encode_event(event: TokenEvent, number: int = 0) -> bytes:
            return b"".join(map(encode_body, chunks.convert(event, number)))

        try:
            async for batch in answers.events(self.settings.quiet):
                if batch:
                    data = b"".join(encode_event(event, number) for number, event in batch)
                else:
                    data = encode_body(chunks.ping()) if protocol.ping is None else protocol.ping
                if data:  # in one write
                    yield data
                    answers.last_sent_time = time.monotonic()
                if batch and batch[-1][1].error is not None:
                    return
        except BaseException as error:
            if (client_error := error_for_client(error)) is None or answers.closed:
                raise
            request.scope[SCOPE_CUT] = isinstance(error, asyncio.CancelledError)
            yield encode_event(TokenEvent("", error=client_error))
            return
        if not protocol.named_events and not protocol.lines:
            yield b"data: [DONE]\n\n"


# The answers of one request: submitted, read as events, and cancelled when nobody reads them any more.


MAX_QUEUED_EVENTS = 4096
"""Events of one request that may wait for a slow reader. With one more, the request is cancelled."""


class SlowClient(CortexError):
    """A client reads its stream so slowly that more than MAX_QUEUED_EVENTS events wait for it."""


class HttpRequestAnswers:
    """Submits all prompts of one HTTP request to the engine, yields the events of their answers, or cancels them."""

    def __init__(
        self,
        engine: Engine,
        mailbox: EventMailbox,
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
        self.last_sent_time = 0.0
        """When the reader of `events` last sent something of them, on the monotonic clock. The reader sets it."""
        self.completions: dict[int, Completion] = {}
        """The completions so far, by the numbers of their prompts."""
        self.failed_count = 0
        """How many prompts ended with an error."""

    async def submit(self, client: str | None, timeout: float | None) -> None:
        """Submit all prompts to the engine; they are tokenized on a thread. Raises what `Engine.submit` raises."""
        await run_on_thread(lambda: self._submit_prompts(client, timeout), lambda done: self.close())

    def _submit_prompts(self, client: str | None, timeout: float | None) -> None:
        """Submit all prompts, on the caller's thread."""
        for number, prompt_input in enumerate(self._request.prompts):
            prompt: Any = prompt_input
            transcript_memory = None
            if not isinstance(prompt_input, str) and not is_token_list(prompt_input):
                if self._transcripts is not None:
                    transcript_memory = TranscriptMemory(self._transcripts, client or "", prompt, self._request.params)
                    prompt = transcript_memory.messages
                prompt = ChatPrompt(prompt, self._request.template_vars, self._request.hints, transcript_memory)
            listener = self._make_listener(number, transcript_memory)
            options: Any = {"listener": listener, "client": client, "timeout": timeout, "adapter": self._adapter}
            with name_field_as_sent(self._request.body):
                self._handles.append(self._engine.submit(prompt, self._request.params, **options))

    def _make_listener(self, number: int, transcript_memory: TranscriptMemory | None) -> Any:
        """Return the listener for a prompt's engine events. `transcript_memory` keeps the answer for later turns."""

        def deliver(event: TokenEvent) -> None:
            if event.completion is not None and transcript_memory is not None:
                transcript_memory.remember(event.completion)
            if self.closed:
                return
            self._events.append((number, event))
            self._news.set()
            if len(self._events) > MAX_QUEUED_EVENTS:
                message = f"more than {MAX_QUEUED_EVENTS} events wait to be read: the request is cancelled"
                self._events.append((number, TokenEvent("", error=SlowClient(message))))
                self.close()

        return lambda event: self._mailbox.put(deliver, event)

    async def events(self, quiet: float) -> AsyncIterator[list[tuple[int, TokenEvent]]]:
        """Yield lists of the events that have come, each with its prompt's number, until all prompts are completed or
        one fails: its error, which may be a SlowClient, is the last event. Yield an empty list whenever the client
        was sent nothing for `quiet` seconds. End after `close`.
        """
        self.last_sent_time = time.monotonic()
        while len(self.completions) < len(self._request.prompts):
            silent_seconds = time.monotonic() - self.last_sent_time
            if silent_seconds >= quiet and not self.closed:
                self.last_sent_time = time.monotonic()
                yield []
                continue
            if not self._events:
                if self.closed:
                    return
                self._news.clear()
                # An alarm, not a timeout, which would make a task for each event.
                alarm = asyncio.get_running_loop().call_later(quiet - silent_seconds, self._news.set)
                try:
                    await self._news.wait()
                finally:
                    alarm.cancel()
                continue
            batch = []
            while self._events and not self.failed_count:
                number, event = self._events.popleft()
                if event.completion is not None:
                    self.completions[number] = event.completion
                self.failed_count += event.error is not None
                batch.append((number, event))
            yield batch
            if self.failed_count:
                return

    @property
    def cancelled_count(self) -> int:
        """How many prompts were cancelled, because the client left or another prompt failed."""
        return len(self._handles) - len(self.completions) - self.failed_count

    def progress(self) -> Progress | None:
        """Return the prefill progress of the first prompt; None if it has not begun."""
        return self._handles[0].progress if self._handles else None

    async def wait_for_answers(self) -> list[tuple[Completion, ...]]:
        """Wait for all prompts and return the answers to each. Raises the error of the first prompt that fails."""
        async for batch in self.events(3600.0):
            if batch and (error := batch[-1][1].error) is not None:
                raise error
        return [(completion, *completion.others) for _, completion in sorted(self.completions.items())]

    def close(self) -> None:
        """Cancel all prompts that have not ended. Safe to call again, and from other threads."""
        self.closed = True
        for handle in self._handles:
            handle.cancel()


EventCallback = Callable[[TokenEvent], None]


class EventMailbox:
    """Hands events from the engine's thread to an asyncio event loop. The engine never waits for the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queued_events: deque[tuple[EventCallback, TokenEvent]] = deque()
        self._wakeup_pending = False
        self.wakeups = 0
        """How often the loop was woken."""

    def put(self, deliver: EventCallback, event: TokenEvent) -> None:
        """Schedule `deliver(event)` on the event loop. Called on the engine's thread."""
        self._queued_events.append((deliver, event))
        if not self._wakeup_pending:
            self._wakeup_pending = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._deliver_all)

    def _deliver_all(self) -> None:
        """Deliver all queued events, on the event loop."""
        self._wakeup_pending = False  # before the first event is taken: what is put after that wakes the loop again
        self.wakeups += 1
        while self._queued_events:
            deliver, event = self._queued_events.popleft()
            deliver(event)


def _sum_tokens(completions: Iterable[Completion]) -> RequestTokens | None:
    """Add up the tokens of the answers to all prompts of a request; None if there are no answers."""
    completion_list = list(completions)
    if not completion_list:
        return None
    answers = [answer for first in completion_list for answer in (first, *first.others)]
    return RequestTokens(
        sum(first.usage.prompt_tokens for first in completion_list),
        sum(first.usage.cached_tokens for first in completion_list),
        sum(answer.usage.completion_tokens for answer in answers),
    )
