"""HTTP basics of the server: bodies read within limits, a limit on open requests, errors as replies, and event
streams.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import sys
import uuid
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cortexmlx.core.blocking_calls import run_on_thread
from cortexmlx.errors import (
    CortexError,
    DownloadFailed,
    EngineClosed,
    InvalidRequest,
    KVCacheFull,
    MemoryRefused,
    ModelNotFound,
    OutOfMemory,
    RequestTimeout,
    UnknownAdapter,
)
from cortexmlx.protocols.anthropic import errors as anthropic_errors
from cortexmlx.protocols.ollama import errors as ollama_errors
from cortexmlx.protocols.openai.errors import ResponseNotFound, error_body, is_client_error
from cortexmlx.server.model_pool import CannotLoad
from cortexmlx.structured.tools import load_client_json

T = TypeVar("T")

log = logging.getLogger("cortexmlx")

RequestHandler = Callable[[Request], Awaitable[Response]]

# What the parts of the server note in the scope of a request.

SCOPE_CLIENT = "cortexmlx.client"
"""The name of the client, in the scope of a request."""

SCOPE_MODEL = "cortexmlx.model"
"""The name of the model that answers, in the scope of a request."""

SCOPE_TOKENS = "cortexmlx.tokens"
"""The tokens of a request's answers, in its scope."""

SCOPE_CUT = "cortexmlx.cut"
"""Whether the server's end cut a request's stream, in its scope."""

SCOPE_BODY_BYTES = "cortexmlx.body_bytes"
"""The size of a request's body, in its scope."""


class RequestRefused(InvalidRequest):
    """Raised for a request that the server refuses with the HTTP status `status` before it reaches the engine."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


async def read_json_body(request: Request, permit: RequestPermit, max_bytes: int, seconds: float) -> dict[str, Any]:
    """Read a JSON body of at most `max_bytes` within `seconds`. Its size counts in `permit`. Raises RequestRefused."""
    declared_size = request.headers.get("content-length", "")
    if declared_size.isdecimal() and int(declared_size) > max_bytes:
        raise _too_large_error(int(declared_size), max_bytes)
    chunks, size, start_time = [], 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(seconds) as limit:
            with permit.receiving_body(limit):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > max_bytes:
                        raise _too_large_error(size, max_bytes)
                    permit.set_body_size(size)
                    chunks.append(chunk)
    except TimeoutError:
        elapsed_seconds = min(seconds, round(asyncio.get_running_loop().time() - start_time, 1))
        raise RequestRefused(
            408, f"{size:,} bytes of the body have come in {elapsed_seconds:g} s, which is not all of it"
        ) from None
    data = b"".join(chunks)
    encoding = request.headers.get("content-encoding", "").strip().lower() or "identity"
    async with permit.semaphore:
        if encoding != "identity":
            data = await run_on_thread(lambda: decompress(data, encoding, max_bytes))
            permit.set_body_size(len(data))
        request.scope[SCOPE_BODY_BYTES] = len(data)
        return await run_by_size(len(data), lambda: parse_json(data))


def decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a gzip or deflate body to at most `max_bytes` plain bytes. Raises RequestRefused for a larger
    one, before it takes memory, and for other encodings.
    """
    if encoding not in _ENCODINGS:
        message = f"a body of the content-encoding {encoding[:40]!r} is not read: send it plain, or with gzip"
        raise RequestRefused(415, message, headers={"accept-encoding": "gzip, deflate, identity"})
    reader = zlib.decompressobj(_ENCODINGS[encoding])
    try:
        plain_data = reader.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no {encoding}: {error}") from None
    if len(plain_data) > max_bytes:
        raise _too_large_error(len(plain_data), max_bytes)
    if not reader.eof or reader.unused_data:
        raise InvalidRequest(f"the body is no whole {encoding}: it ends early, or something follows")
    return plain_data


async def run_by_size(size: int, work: Callable[[], T]) -> T:
    """Run `work` on a body of `size` bytes: on this thread if it is small, or else on another."""
    return work() if size <= SMALL_BODY else await run_on_thread(work)


_ENCODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


def _too_large_error(size: int, max_bytes: int) -> RequestRefused:
    """Return the error for a body that is too large (413)."""
    return RequestRefused(413, f"the body has {size:,} bytes or more, but must have at most {max_bytes:,}")


# JSON that strangers send: parsed within bounds, so that it holds up nobody else's stream.


MAX_VALUES = 1 << 18
"""How many values and names a body may have. Python's parser holds the interpreter's lock while it makes them, on
whichever thread: about 0.2 s for a million. A thread is no help; this is.
"""

MAX_DEPTH = 128
"""How deep a body may be nested. Code that descends into it does not exhaust its stack."""

SMALL_BODY = 1 << 16
"""Bytes of a body that may be parsed and read on the event loop, which takes some milliseconds. Bodies of this size are
not counted against the memory that those of all requests may take.
"""

_TEXT_PIECE = re.compile(rb'(?:[^"\\]{1,1024}+|\\.){0,4096}+', re.DOTALL)
"""A piece of a text's inside. A pattern holds the interpreter's lock, too, for as long as it matches."""


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse the JSON object in a body, with limits on its values and its depth. Raises InvalidRequest."""
    _check_value_count(data)
    try:
        body = load_client_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is no UTF-8: {error.reason} at byte {error.start:,}") from None
    except RecursionError:
        raise _too_deep_error() from None
    except ValueError as error:
        if str(error).endswith(" digits"):
            raise InvalidRequest(f"the body has {error}") from None
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_nesting(body)
    return body


def _check_value_count(data: bytes) -> None:
    """Raise InvalidRequest if a body has more than MAX_VALUES values, before it is parsed."""
    if sum(map(data.count, (b"[", b"{", b",", b":"))) <= MAX_VALUES:
        return
    count = at = 0
    while at < len(data):
        text = data.find(b'"', at)
        end = text if text >= 0 else len(data)
        signs = sum(data.count(sign, at, end) for sign in (b"[", b"{", b",", b":"))
        count += signs or text >= 0  # nothing before a text: no JSON, and many of these take as long
        if count > MAX_VALUES:
            raise _too_many_values_error()
        at = end + 1
        while (piece := _TEXT_PIECE.match(data, at)) and piece.end() > at:
            at = piece.end()
        at += 1


def _check_nesting(body: dict[str, Any]) -> None:
    """Raise InvalidRequest if a parsed body is nested too deeply, or its tool calls' arguments have too many values."""
    level: list[Any] = [body]
    value_count = 0
    for _ in range(MAX_DEPTH):
        value_count += sum(_count_argument_values(each) for each in level if isinstance(each, dict))
        if value_count > MAX_VALUES:
            raise _too_many_values_error()
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep_error()


def _count_argument_values(call: dict[str, Any]) -> int:
    """Return an upper bound for the number of values in a call's arguments, if those are JSON inside a text."""
    text = call.get("input" if call.get("type") == "tool_use" else "arguments")
    return sum(map(text.count, "[{,:")) if isinstance(text, str) else 0


def _too_many_values_error() -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {MAX_VALUES:,} values: send a text instead of token ids, or shorten it"
    )


def _too_deep_error() -> InvalidRequest:
    return InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep")


# How many requests are open at once, shared among clients so that none locks the others out.


SLOW_BODY_SECONDS = 5.0
"""A body that has been arriving for longer gives its place to another request of its client, if all are taken."""

MAX_THREADS = 4
"""Bodies of one client that threads work on at once: to make them plain, read them, and prepare their prompts."""

MAX_FULL_BODIES = 16
"""Bodies of the greatest size that open requests may have in memory."""


class RequestLimiter:
    """Limits the open HTTP requests (`max_requests`) and the bytes of their bodies (`max_bytes`), fairly among clients.
    Half of the requests are reserved, the same number for each client; the others go to whoever comes first. If there
    are too few to reserve one for each client, a client has at most half of them. If there are several clients, each
    has at most half of the bytes. Small bodies are never refused.
    """

    def __init__(self, max_requests: int, clients: int = 1, max_bytes: int = sys.maxsize) -> None:
        self._max_requests = max_requests
        self._other_clients = max(0, clients - 1)
        shared = clients > 1
        self._reserved_per_client = max_requests // (2 * clients) if shared else 0
        self._max_per_client = (max_requests + 1) // 2 if shared and not self._reserved_per_client else max_requests
        self._max_bytes = max_bytes
        self._max_bytes_per_client = max_bytes // 2 if shared else max_bytes
        self._open: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._slow: dict[RequestPermit, asyncio.Timeout] = {}
        self._semaphores = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, bool], asyncio.Semaphore]]()

    @property
    def open_count(self) -> int:
        """How many requests are open."""
        return self._open.total()

    def acquire(self, client: str = "") -> RequestPermit:
        """Return a permit for a request. Raises RequestRefused (429) if this client has none left."""
        if not self._has_room(client) and not self._cut_slow_body(client):
            client_count = self._open[client]
            whose = "" if client_count == self.open_count else " of this key, and others,"
            raise _overloaded_error(f"{client_count} requests{whose} run or wait")
        self._open[client] += 1
        return RequestPermit(self, client)

    def body_semaphore(self, client: str, with_images: bool = False) -> asyncio.Semaphore:
        """Return the semaphore that lets at most MAX_THREADS threads work on a client's bodies at once, since a hundred
        threads would keep the interpreter's lock from the event loop for seconds. Bodies `with_images` have a semaphore
        of their own, since fetching an image may take long.
        """
        semaphores = self._semaphores.setdefault(asyncio.get_running_loop(), {})
        return semaphores.setdefault((client, with_images), asyncio.Semaphore(MAX_THREADS))

    def _has_room(self, client: str) -> bool:
        """Whether a client may open another request."""
        client_count, free_count = self._open[client], self._max_requests - self.open_count
        if client_count < self._reserved_per_client:
            return free_count > 0
        other_counts = (count for other_client, count in self._open.items() if other_client != client)
        used_reserved = sum(min(self._reserved_per_client, count) for count in other_counts)
        return (
            free_count > self._reserved_per_client * self._other_clients - used_reserved
            and client_count < self._max_per_client
        )

    def _has_body_memory(self, client: str, added_bytes: int) -> bool:
        """Whether a client's bodies may take this many more bytes."""
        client_bytes, all_bytes = self._bytes[client] + added_bytes, self._bytes.total() + added_bytes
        return client_bytes <= self._max_bytes_per_client and all_bytes <= self._max_bytes

    def _cut_slow_body(self, client: str) -> bool:
        """Cancel the oldest of this client's bodies that arrive slowly; return whether there was one."""
        now = asyncio.get_running_loop().time()
        for permit, limit in self._slow.items():
            if permit.client == client and now - permit.since >= SLOW_BODY_SECONDS:
                permit.release()
                limit.reschedule(now)
                return True
        return False


class RequestPermit:
    """A permit for one open request, from the RequestLimiter, until it is released."""

    def __init__(self, limiter: RequestLimiter, client: str) -> None:
        self.client = client
        self.since = 0.0
        """When its body began to arrive, on the loop's clock."""
        self.semaphore = limiter.body_semaphore(client)
        self._limiter = limiter
        self._released = False
        self._size = 0

    @contextmanager
    def receiving_body(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Count the body as slow while it arrives in this context. To cancel it, the limiter makes `limit` expire."""
        self.since = asyncio.get_running_loop().time()
        self._limiter._slow[self] = limit
        try:
            yield
        finally:
            self._limiter._slow.pop(self, None)

    def set_body_size(self, size: int) -> None:
        """Record the body's size so far. Raises RequestRefused if this client's or all bodies take too much memory."""
        if self._released:
            return
        while size > SMALL_BODY and not self._limiter._has_body_memory(self.client, size - self._size):
            if not self._limiter._cut_slow_body(self.client):
                raise _overloaded_error("the bodies of other requests take the memory that there is for them")
        if not self._released:
            self._limiter._bytes[self.client] += size - self._size
            self._size = size

    def release(self) -> None:
        """Give the permit back. Safe to call again."""
        if not self._released:
            self._released = True
            self._limiter._slow.pop(self, None)
            self._limiter._open[self.client] -= 1
            self._limiter._bytes[self.client] -= self._size
            if not self._limiter._open[self.client]:
                del self._limiter._open[self.client], self._limiter._bytes[self.client]

    def __enter__(self) -> RequestPermit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _overloaded_error(reason: str) -> RequestRefused:
    """Return the error for too many requests (429), with `retry-after`."""
    return RequestRefused(429, f"{reason}: come again later", "overloaded", {"retry-after": "1"})


# Replies: JSON, errors in the form of the protocol, and streams of events.


def with_error_replies(answer: RequestHandler) -> RequestHandler:
    """Wrap a handler: errors that it raises become replies in the form of the path's protocol."""

    async def answer_or_error(request: Request) -> Response:
        try:
            return await answer(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except BaseException as error:
            if (client_error := error_for_client(error)) is None:
                raise
            return error_reply(client_error, request.url.path)

    return answer_or_error


def error_for_client(error: BaseException) -> CortexError | None:
    """Convert any exception into the error to tell the client; None if the exception ends this process or a
    generator. A CancelledError becomes an EngineClosed, as if the server were ending: if a client has disconnected,
    nobody reads it. Bugs are logged, and so are panics of libraries, which are no subclass of Exception. The result has
    no traceback, whose frames would keep the body of the request.
    """
    if isinstance(error, CortexError):
        return error.with_traceback(None)
    if isinstance(error, asyncio.CancelledError):
        return EngineClosed("the server ends: ask again when it is back, or another one")
    if isinstance(error, GeneratorExit | KeyboardInterrupt | SystemExit):
        return None
    log.error("a request failed: unexpected %s", type(error).__name__, exc_info=error)
    return CortexError("an unexpected error, which the server's log tells")


def http_status(error: CortexError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestRefused):
        return error.status
    is_missing = isinstance(error, ModelNotFound) and not isinstance(error, DownloadFailed)
    if is_missing or isinstance(error, ResponseNotFound | UnknownAdapter):
        return 404
    if is_client_error(error):
        return 400
    if isinstance(error, RequestTimeout):
        return 504
    return 503 if isinstance(error, CannotLoad | EngineClosed | KVCacheFull | MemoryRefused | OutOfMemory) else 500


_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""The types of errors that have a status of their own."""


def error_reply(error: CortexError, path: str) -> Response:
    """Return the HTTP reply for an error, in the form of the protocol that `path` belongs to."""
    status = http_status(error)
    headers = error.headers if isinstance(error, RequestRefused) else {}
    if isinstance(error, CannotLoad):
        headers = {"retry-after": str(math.ceil(error.seconds))}
    if anthropic_errors.is_messages_path(path):
        id = f"req_{uuid.uuid4().hex}"
        return json_reply(anthropic_errors.error_body(error, status, id), status, {**headers, "request-id": id})
    if ollama_errors.is_ollama_path(path):
        return json_reply(ollama_errors.error_body(error), status, headers)
    body = error_body(error)
    if status < 500:
        body["error"]["type"] = _ERROR_TYPES.get(status, "invalid_request_error")
    if isinstance(error, RequestRefused):
        body["error"]["code"] = error.code
    return json_reply(body, status, headers)


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an HTTP reply with a JSON body."""
    return Response(to_json_bytes(body), status, headers, "application/json")


_JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json_bytes(body: Any) -> bytes:
    """Serialize a value as UTF-8 JSON. If a text has lone surrogates, non-ASCII characters are escaped."""
    try:
        return _JSON_ENCODER.encode(body).encode()
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()


def json_line(body: Any) -> bytes:
    """Return a value as a line of JSON. It has no Unicode line breaks: many clients would split it there."""
    data = to_json_bytes(body)
    for sign in "\u2028\u2029\x85":
        data = data.replace(sign.encode(), f"\\u{ord(sign):04x}".encode())
    return data + b"\n"


def server_sent_event(body: Any, name: str | None = None) -> bytes:
    """Return a server-sent event's bytes."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + json_line(body) + b"\n"


LINES_TYPE = "application/x-ndjson"
"""The media type of a stream of JSON lines."""


class EventStream(StreamingResponse):
    """A reply of server-sent events, or of lines. `end` is called after the reply, maybe twice, also if the client left
    before the reply began.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(events, 200, headers, media_type)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply, and call `end`."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    async def listen_for_disconnect(self, receive: Receive) -> None:
        """Wait until the client has disconnected or has received all, then call `end`. Starlette calls it."""
        await super().listen_for_disconnect(receive)
        self._end()


async def run_until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work` and return its result. If the client disconnects first, cancel it and raise ClientDisconnect."""
    result, away = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(request))
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


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client has disconnected."""
    with suppress(ClientDisconnect):
        while (await request.receive())["type"] != "http.disconnect":
            pass
