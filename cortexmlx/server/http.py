"""Requests and replies over HTTP: bodies within bounds, errors in the protocol's words, and streams of events."""

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

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cortexmlx.core.event_loop import on_a_thread
from cortexmlx.errors import (
    CortexError,
    EngineClosed,
    InvalidRequest,
    KVCacheFull,
    MemoryRefused,
    OutOfMemory,
    RequestTimeout,
    UnknownAdapter,
)
from cortexmlx.protocols.anthropic import errors as anthropic_errors
from cortexmlx.protocols.openai.errors import NotStored, error_body, is_refusal
from cortexmlx.server.model_pool import CannotLoad

T = TypeVar("T")

log = logging.getLogger("cortexmlx")

Answer = Callable[[Request], Awaitable[Response]]

# What the parts of the server note in the scope of a request.

CLIENT = "cortexmlx.client"
"""The name of the client, in the scope of a request."""

MODEL = "cortexmlx.model"
"""The name of the model that answers, in the scope of a request."""

TOKENS = "cortexmlx.tokens"
"""The tokens of a request's answers, in its scope."""

BODY_BYTES = "cortexmlx.body_bytes"
"""The size of a request's body, in its scope."""


class RequestRefused(InvalidRequest):
    """A request that is refused before the engine hears of it."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


async def json_body(request: Request, place: Place, most: int, seconds: float) -> dict[str, Any]:
    """Return the JSON object that was sent, of at most `most` bytes, within `seconds`. Raises RequestRefused."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(int(declared), most)
    pieces, size, began = [], 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(seconds) as limit:
            with place.while_it_arrives(limit):
                async for piece in request.stream():
                    size += len(piece)
                    if size > most:
                        raise _too_large(size, most)
                    place.hold(size)
                    pieces.append(piece)
    except TimeoutError:
        took = min(seconds, round(asyncio.get_running_loop().time() - began, 1))
        raise RequestRefused(
            408, f"{size:,} bytes of the body have come in {took:g} s, which is not all of it"
        ) from None
    data = b"".join(pieces)
    if (coding := request.headers.get("content-encoding", "").strip().lower() or "identity") != "identity":
        data = await on_a_thread(lambda: decompress(data, coding, most))
        place.hold(len(data))
    request.scope[BODY_BYTES] = len(data)
    return await by_size(len(data), lambda: parse_json(data))


def decompress(data: bytes, coding: str, most: int) -> bytes:
    """Return a compressed body of at most `most` bytes. Raises RequestRefused, before more memory is taken, and for
    other codings than gzip and deflate.
    """
    if coding not in _CODINGS:
        why = f"a body of the content-encoding {coding[:40]!r} is not read: send it plain, or with gzip"
        raise RequestRefused(415, why, headers={"accept-encoding": "gzip, deflate, identity"})
    reader = zlib.decompressobj(_CODINGS[coding])
    try:
        plain = reader.decompress(data, most + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no {coding}: {error}") from None
    if len(plain) > most:
        raise _too_large(len(plain), most)
    if not reader.eof or reader.unused_data:
        raise InvalidRequest(f"the body is no whole {coding}: it ends early, or something follows")
    return plain


async def by_size(size: int, work: Callable[[], T]) -> T:
    """Return what `work` does with a body of so many bytes: on a thread, unless it is small."""
    return work() if size <= SMALL else await on_a_thread(work)


_CODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


def _too_large(size: int, most: int) -> RequestRefused:
    return RequestRefused(413, f"the body has {size:,} bytes or more, but must have at most {most:,}")


# JSON that strangers send: parsed within bounds, so that it holds up nobody else's stream.


MOST_VALUES = 1 << 18
"""How many values and names a body may have. Python's parser holds the interpreter's lock while it makes them, on
whichever thread: about 0.2 s for a million. A thread is no help; this is.
"""

MOST_DEPTH = 128
"""How deep a body may be nested. Code that descends into it does not exhaust its stack."""

SMALL = 1 << 16
"""Bytes of a body that may be parsed and read on the event loop: some milliseconds."""

_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{,:]', re.DOTALL)
"""A text, also one without an end; or what stands before a value."""


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises InvalidRequest."""
    _check_values(data)
    try:
        body = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is no UTF-8: {error.reason} at byte {error.start:,}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise InvalidRequest("the body has an integer of more than 4,300 digits") from None
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_nested(body)
    return body


def _check_values(data: bytes) -> None:
    """Raise InvalidRequest if there are too many values. Texts are searched only if their marks could be too many."""
    if sum(map(data.count, (b"[", b"{", b",", b":"))) <= MOST_VALUES:
        return
    count = 0
    for part in _PARTS.finditer(data):
        count += part[0][0] != 0x22
        if count > MOST_VALUES:
            raise _too_many()


def _check_nested(body: dict[str, Any]) -> None:
    """Raise InvalidRequest if it is too deep, or if the arguments of its calls have too many values together."""
    level: list[Any] = [body]
    inner = 0
    for _ in range(MOST_DEPTH):
        inner += sum(_values_in_arguments(each) for each in level if isinstance(each, dict))
        if inner > MOST_VALUES:
            raise _too_many()
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _values_in_arguments(call: dict[str, Any]) -> int:
    """Return how many values the arguments of a call may have, which are JSON in a text."""
    text = call.get("input" if call.get("type") == "tool_use" else "arguments")
    return sum(map(text.count, "[{,:")) if isinstance(text, str) else 0


def _too_many() -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {MOST_VALUES:,} values: send a text instead of token ids, or shorten it"
    )


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested more than {MOST_DEPTH} deep")


# How many requests are open at once, shared among clients so that none locks the others out.


SLOW_SECONDS = 5.0
"""A body that has been arriving for longer gives its place to another request of its client, if all are taken."""

BODIES = 16
"""Bodies of the greatest size that open requests may have in memory."""


class Places:
    """At most `most` open requests of `clients` clients. Half of the places are kept for single clients, as many for
    each. The other half is for whoever comes first. If there are too few to keep one for each, a client has half of
    them at most. Their bodies have at most `most_bytes` together, those of one client of several half of it. Small
    bodies are never refused.
    """

    def __init__(self, most: int, clients: int = 1, most_bytes: int = sys.maxsize) -> None:
        self._most = most
        self._others = max(0, clients - 1)
        shared = clients > 1
        self._own = most // (2 * clients) if shared else 0
        self._most_of_one = (most + 1) // 2 if shared and not self._own else most
        self._most_bytes = most_bytes
        self._most_bytes_of_one = most_bytes // 2 if shared else most_bytes
        self._open: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._slow: dict[Place, asyncio.Timeout] = {}

    @property
    def open(self) -> int:
        """How many requests are open."""
        return self._open.total()

    def take(self, client: str = "") -> Place:
        """Return a place for a request. Raises RequestRefused if there is none for this client."""
        if not self._has_room(client) and not self._cut_a_slow_body(client):
            mine = self._open[client]
            whose = f"{mine} requests" if mine == self.open else f"{mine} requests of this key, and others,"
            raise _too_busy(f"{whose} run or wait")
        self._open[client] += 1
        return Place(self, client)

    def _has_room(self, client: str) -> bool:
        mine, free = self._open[client], self._most - self.open
        if mine < self._own:
            return free > 0
        taken = sum(min(self._own, count) for other, count in self._open.items() if other != client)
        return free > self._own * self._others - taken and mine < self._most_of_one

    def _has_memory(self, client: str, more: int) -> bool:
        mine, all_bytes = self._bytes[client] + more, self._bytes.total() + more
        return mine <= self._most_bytes_of_one and all_bytes <= self._most_bytes

    def _cut_a_slow_body(self, client: str) -> bool:
        """End the oldest of this client's bodies that arrive slowly. Return whether there is one."""
        now = asyncio.get_running_loop().time()
        for place, limit in self._slow.items():
            if place.client == client and now - place.since >= SLOW_SECONDS:
                place.leave()
                limit.reschedule(now)
                return True
        return False


class Place:
    """The place of one request, until it is left."""

    def __init__(self, places: Places, client: str) -> None:
        self.client = client
        self.since = 0.0
        """When its body began to arrive, on the loop's clock."""
        self._places = places
        self._left = False
        self._size = 0

    @contextmanager
    def while_it_arrives(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Let the body of the request be cut with `limit` in this context, if it arrives slowly and others wait."""
        self.since = asyncio.get_running_loop().time()
        self._places._slow[self] = limit
        try:
            yield
        finally:
            self._places._slow.pop(self, None)

    def hold(self, size: int) -> None:
        """Say that the body has so many bytes by now. Raises RequestRefused if bodies take too much memory."""
        if self._left:
            return
        while size > SMALL and not self._places._has_memory(self.client, size - self._size):
            if not self._places._cut_a_slow_body(self.client):
                raise _too_busy("the bodies of other requests take the memory that there is for them")
        if not self._left:
            self._places._bytes[self.client] += size - self._size
            self._size = size

    def leave(self) -> None:
        """Leave it. Safe to call again."""
        if not self._left:
            self._left = True
            self._places._slow.pop(self, None)
            self._places._open[self.client] -= 1
            self._places._bytes[self.client] -= self._size
            if not self._places._open[self.client]:
                del self._places._open[self.client], self._places._bytes[self.client]

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()


def _too_busy(why: str) -> RequestRefused:
    return RequestRefused(429, f"{why}: come again later", "overloaded", {"retry-after": "1"})


# Replies: JSON, errors in the form of the protocol, and streams of events.


def with_error_replies(answer: Answer) -> Answer:
    """Return the same, with errors as replies in the protocol of the path."""

    async def answer_or_error(request: Request) -> Response:
        try:
            return await answer(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except BaseException as error:
            if (why := error_for_client(error)) is None:
                raise
            return error_reply(why, request.url.path)

    return answer_or_error


def error_for_client(error: BaseException) -> CortexError | None:
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


def status_of(error: CortexError) -> int:
    """Return the status of an error."""
    if isinstance(error, RequestRefused):
        return error.status
    if isinstance(error, NotStored | UnknownAdapter):
        return 404
    if is_refusal(error):
        return 400
    if isinstance(error, RequestTimeout):
        return 504
    return 503 if isinstance(error, CannotLoad | EngineClosed | KVCacheFull | MemoryRefused | OutOfMemory) else 500


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""The types of errors that have a status of their own."""


def error_reply(error: CortexError, path: str) -> Response:
    """Return the reply that tells a client of an error, in the form of the protocol that `path` belongs to."""
    status = status_of(error)
    headers = error.headers if isinstance(error, RequestRefused) else {}
    if isinstance(error, CannotLoad):
        headers = {"retry-after": str(math.ceil(error.seconds))}
    if anthropic_errors.is_own_path(path):
        id = f"req_{uuid.uuid4().hex}"
        return json_reply(anthropic_errors.error_body(error, status, id), status, {**headers, "request-id": id})
    body = error_body(error)
    if status < 500:
        body["error"]["type"] = _KINDS.get(status, "invalid_request_error")
    if isinstance(error, RequestRefused):
        body["error"]["code"] = error.code
    return json_reply(body, status, headers)


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a whole body."""
    return Response(dumped(body), status, headers, "application/json")


_TEXT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumped(body: Any) -> bytes:
    """Return JSON as bytes. Halves of characters, which UTF-8 cannot hold, are escaped."""
    try:
        return _TEXT.encode(body).encode()
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()


def event(body: Any, name: str | None = None) -> bytes:
    """Return an event of a stream. Many clients split it as `str.splitlines` does: it has no line break of Unicode."""
    head = b"" if name is None else f"event: {name}\n".encode()
    data = dumped(body)
    for sign in "\u2028\u2029\x85":
        data = data.replace(sign.encode(), f"\\u{ord(sign):04x}".encode())
    return head + b"data: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of events. `end` is called when it is over, also if the client has gone before it began, and perhaps
    again.
    """

    def __init__(
        self, events: AsyncIterator[bytes], end: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})}
        super().__init__(events, 200, headers, "text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    async def listen_for_disconnect(self, receive: Receive) -> None:
        """Wait until the client has gone, or has it all."""
        await super().listen_for_disconnect(receive)
        self._end()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` returns, or raise what it raises. If the client goes away before, cancel it and raise
    ClientDisconnect.
    """
    result, away = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone(request))
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


async def wait_until_gone(request: Request) -> None:
    """Return when the client has gone."""
    while True:
        try:
            message = await request.receive()
        except ClientDisconnect:
            return
        if message["type"] == "http.disconnect":
            return
