"""An application on an address of this machine, from the first request to the last."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols.openai.errors import error_body
from cortexmlx.server.http import RequestRefused, dumped

OWN_FILES = 128
"""Open files that are kept for the model, the disk cache and the terminal."""

LAST_WORDS = 1.0
"""Seconds in which requests that are cut at the end tell their clients so."""


class Listening:
    """Answers on a socket of `bound` while `run` runs. `stop`, SIGINT and SIGTERM end it: no new requests are taken,
    those that run get `grace` seconds.
    """

    def __init__(
        self, application: Any, bound: socket.socket, grace: float = 10.0, limits: ConnectionLimits | None = None
    ) -> None:
        import uvicorn

        self._socket = bound
        self.url = _url(bound)
        """The address, for programs on this machine."""
        listening = self
        given = limits or ConnectionLimits()
        allowed = replace(given, connections=connections_that_fit(given.connections))
        # uvicorn counts whole seconds, and 0 would be for ever.
        config = uvicorn.Config(
            application,
            http=protocol_with_limits(allowed),
            ws="none",
            h11_max_incomplete_event_size=allowed.head_bytes,
            timeout_keep_alive=max(1, round(allowed.idle_seconds)),
            log_level="error",  # whoever sends nonsense could fill the log with warnings
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(grace)),
        )

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                with listening._signals():
                    yield

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await super().shutdown(sockets)
                if tasks := set(self.server_state.tasks):  # the time is over: let them tell their clients
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks, timeout=LAST_WORDS)

        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(_is_news)
        self._server = Server(config)

    def run(self) -> None:
        """Answer until the end."""
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self._socket.close()

    def stop(self) -> None:
        """End it. Safe from other threads, and to call again: then requests that run are cut."""
        if self._server.should_exit:
            self._server.force_exit = True
        self._server.should_exit = True

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._server.server_state.connections)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals end the server, on the main thread. On another, the program has its own."""
        loop = asyncio.get_running_loop()
        taken = []
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):  # not the main thread
                loop.add_signal_handler(number, self.stop)
                taken.append(number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether an error is worth a line: not a request that was cut because the server ends, and not a client
    that has gone while several events of its stream were written, which asyncio tells from the fifth on.
    """
    if record.name == "asyncio" and record.msg == "socket.send() raised exception.":
        return False
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def connections_that_fit(wanted: int) -> int:
    """Return how many of `wanted` connections the limit on open files allows, beside the model's own files. The limit
    is raised as far as the system lets this process.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(ValueError, OSError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
            soft = possible
        return max(1, min(wanted, soft - OWN_FILES))
    return wanted


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Port 0: any free port. Raises CortexError if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CortexError(f"there is no address {host!r}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CortexError(
                f"port {port} of {host} is in use: stop the other server, or give --port another"
            ) from None
        raise CortexError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


# Connection: HTTP on one connection, with limits on what a client may take of it, in time and in size.


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client may take of a connection. All times are in seconds."""

    head_seconds: float = 20.0
    """How long a request's line and headers may take, and a new connection be silent."""
    idle_seconds: float = 30.0
    """How long a connection stays open for its next request."""
    send_seconds: float = 60.0
    """How long a client may read nothing of an answer that waits for it."""
    head_bytes: int = 64 << 10
    """Bytes of a request's line and headers, at most."""
    connections: int = 1024
    """Connections at once, at most. Fewer if the system allows fewer open files."""

    def __post_init__(self) -> None:
        for name in ("head_seconds", "idle_seconds", "send_seconds", "head_bytes", "connections"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}, but must be above 0", field=name)


class Pending(Enum):
    """What a client must send soon."""

    NOTHING = auto()
    HEAD = auto()
    """The line and the headers of a request."""
    REST = auto()
    """The rest of a body that was answered before its end, as one that is too large."""


class Connection(H11Protocol):
    """uvicorn's protocol with an end for each state in which a client could stay for ever: a request's head, the time
    between two requests, a body that nobody reads, and an answer that the client does not read. `json_body` limits the
    time of a body that is read.
    """

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._awaited = Pending.NOTHING
        self._receiving = _Timer(self.loop)
        self._sending = _Timer(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin. If there are too many connections, an idle one ends; if all are in use, this one is refused."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections and not self._end_an_idle_one():
            why = f"{self.limits.connections:,} connections are in use: come again later"
            self._refuse(RequestRefused(503, why, "overloaded", {"retry-after": "1"}))
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if not self.transport.is_closing():  # otherwise it is the rest of a request that was refused
            super().data_received(data)
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request. h11 says with which status."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            why = f"the line and the headers must have at most {self.limits.head_bytes:,} bytes together"
        else:
            why = f"this is no HTTP request: {str(error)[:200]}"
        self._refuse(RequestRefused(status, why))

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that is idle."""
        super().timeout_keep_alive_handler()
        self._watch()

    def pause_writing(self) -> None:
        """Wait for the client, which reads too slowly."""
        super().pause_writing()
        self._limit_sending()

    def resume_writing(self) -> None:
        """Go on: the client has read something."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._sending.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """End. No timer is left."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._receiving.stop()
        self._sending.stop()

    def _watch(self) -> None:
        """Limit the time of what is awaited from now on. For the same as before, the time does not begin anew."""
        awaited = self._pending_part()
        if awaited is not self._awaited:
            self._awaited = awaited
            self._receiving.stop()
            if awaited is not Pending.NOTHING:
                self._receiving.start(self.limits.head_seconds, self._late)
        if self.transport.is_closing():
            self._limit_sending()

    def _pending_part(self) -> Pending:
        if self.transport.is_closing():
            return Pending.NOTHING
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            return Pending.REST
        idle = self.timeout_keep_alive_task is not None  # uvicorn limits this time
        return Pending.HEAD if self.conn.their_state is h11.IDLE and not idle else Pending.NOTHING

    def _late(self) -> None:
        begun = bool(self.conn.trailing_data[0])
        if self._awaited is Pending.HEAD and begun:
            self._refuse(
                RequestRefused(408, f"a request's headers must be whole within {self.limits.head_seconds:g} s")
            )
        else:
            self.transport.close()
        self._watch()

    def _limit_sending(self) -> None:
        self._sending.start(self.limits.send_seconds, self.transport.abort)

    def _end_an_idle_one(self) -> bool:
        """Close a connection that waits for its next request. Return whether there is one."""
        for other in self.connections:
            if isinstance(other, Connection) and other.timeout_keep_alive_task is not None:
                other.timeout_keep_alive_handler()
                return True
        return False

    def _refuse(self, error: RequestRefused) -> None:
        """Answer with an error instead of the application, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body(error)
            body["error"] |= {"type": "server_error" if error.status == 503 else "invalid_request_error"}
            told = dumped(body)
            headers = {**error.headers, "content-type": "application/json", "content-length": str(len(told))}
            phrase = HTTPStatus(error.status).phrase
            head = h11.Response(
                status_code=error.status, reason=phrase, headers=[*headers.items(), ("connection", "close")]
            )
            for part in (head, h11.Data(data=told), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application has nobody to answer
            self.cycle.message_event.set()
        self.transport.close()


class _Timer:
    """Calls a function after some time, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: asyncio.TimerHandle | None = None

    def start(self, seconds: float, then: Callable[[], None]) -> None:
        """Begin. If it runs already, it goes on as it is."""
        if self._running is None:
            self._running = self._loop.call_later(seconds, then)

    def stop(self) -> None:
        """Stop it, if it runs."""
        if self._running is not None:
            self._running.cancel()
            self._running = None


def protocol_with_limits(limits: ConnectionLimits) -> type[Connection]:
    """Return the protocol with these limits, as uvicorn takes it."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
