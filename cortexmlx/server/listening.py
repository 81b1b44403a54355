"""Runs the application on a socket with uvicorn: shutdown, signals, and limits for each connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from http import HTTPStatus
from math import isfinite
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols.openai.errors import error_body
from cortexmlx.server.http import RequestRefused, to_json_bytes

RESERVED_FILES = 128
"""Open files that are kept for the model, the disk cache and the terminal."""

WAITING_CONNECTIONS, ACCEPTED_AT_ONCE = 2048, RESERVED_FILES // 8
"""Connections that wait in the system, and that are accepted before those too many of them are closed again."""

CANCEL_SECONDS = 1.0
"""Seconds in which requests that are cut at the end tell their clients so."""

MAX_READ = 16 << 10
"""Bytes that are read of a connection at once. In chunks of one byte, they take 0.05 s, in which nobody else is heard.
"""


class HttpServer:
    """Serves an ASGI application with uvicorn until `stop` or a signal; running requests get `grace` seconds. `tell`
    is called with a line about the requests that the server waits for at its end, and one about those that it cuts.
    """

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        grace: float = 10.0,
        limits: ConnectionLimits | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        import uvicorn

        self._socket, self._tell = listener, tell
        self.url = _listener_url(listener)
        """The address, for programs on this machine."""
        http_server = self
        given_limits = limits or ConnectionLimits()
        actual_limits = replace(given_limits, connections=raise_file_limit(given_limits.connections))
        # uvicorn counts whole seconds, and 0 would be for ever.
        config = uvicorn.Config(
            application,
            http=type("LimitedConnection", (LimitedConnection,), {"limits": actual_limits}),
            ws="none",
            h11_max_incomplete_event_size=actual_limits.head_bytes,
            timeout_keep_alive=max(1, round(actual_limits.idle_seconds)),
            log_level="error",  # whoever sends nonsense could fill the log with warnings
            access_log=False,
            use_colors=False,  # nor does stderr take them: it writes control characters out
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=max(1, round(grace)) if isfinite(grace) else None,
        )

        class Server(uvicorn.Server):
            def capture_signals(self) -> Any:
                return http_server._stop_on_signals()

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                http_server._socket.listen(WAITING_CONNECTIONS)  # asyncio has one number for both

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await super().shutdown(sockets)
                if tasks := set(self.server_state.tasks):  # the time is over: let them tell their clients
                    http_server._tell(f"cut before their end: {len(tasks):,}")
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks, timeout=CANCEL_SECONDS)

        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(_is_worth_logging)
        self._server = Server(config)

    def run(self) -> None:
        """Serve until the server is stopped."""
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Stop the server. Safe from other threads; a second call cuts the running requests."""
        if self._server.should_exit:
            self._server.force_exit = True
            self._server.servers = []  # from Python 3.12 on, uvicorn waits for their connections
            return
        self._server.should_exit = True
        if count := len(self._server.server_state.tasks):
            seconds = self._server.config.timeout_graceful_shutdown
            limit = "as long as it takes" if seconds is None else f"up to {seconds} s"
            requests = "1 request" if count == 1 else f"{count:,} requests"
            self._tell(f"waiting for {requests}, for {limit}. Ctrl-C again ends it now.")

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """Stop the server on SIGINT, SIGTERM and SIGHUP (its terminal closes) inside this context, if it runs on the
        main thread. With nohup, SIGHUP stays ignored.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal_number == signal.SIGHUP and signal.getsignal(signal_number) is signal.SIG_IGN:
                    continue
                with suppress(ValueError, RuntimeError):  # not the main thread
                    loop.add_signal_handler(signal_number, self.stop)
                    stack.callback(loop.remove_signal_handler, signal_number)
            yield


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether to log a record, as a log filter. Dropped are requests that were cut because the server ends, uvicorn's
    line on them, and what asyncio logs from the fifth write on to a client that has disconnected.
    """
    if str(record.msg).startswith(("socket.send() raised exception.", "Cancel %s running task(s)")):
        return False
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def raise_file_limit(requested_count: int) -> int:
    """Raise the limit on open files; return how many of `requested_count` connections fit beside `RESERVED_FILES`."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = requested_count + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed_files:
        possible_files = needed_files if hard == resource.RLIM_INFINITY else min(needed_files, hard)
        with suppress(ValueError, OSError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible_files, hard))
            soft = possible_files
        return max(1, min(requested_count, soft - RESERVED_FILES))
    return requested_count


def _listener_url(listener: socket.socket) -> str:
    """Return the URL of a listening socket, for programs on this machine."""
    host, port = listener.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def open_listener(host: str, port: int) -> socket.socket:
    """Open a socket that listens on an address (port 0: any free one). Raises CortexError if it cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CortexError(f"there is no address {host!r}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(WAITING_CONNECTIONS)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CortexError(
                f"port {port} of {host} is in use: stop the other server, or give --port another"
            ) from None
        raise CortexError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


# LimitedConnection: HTTP on one connection, with limits on what a client may take of it, in time and in size.


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the clients' connections. All times are in seconds."""

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


class AwaitedPart(Enum):
    """The part of a request that a client must send within the time limit."""

    NOTHING = auto()
    HEAD = auto()
    """The line and the headers of a request."""
    REST = auto()
    """The rest of a body that was answered before its end, as one that is too large."""


class LimitedConnection(H11Protocol):
    """An HTTP/1.1 connection of uvicorn that no client can keep open for ever. It limits the time of a request's head,
    between two requests, of a body that nobody reads, and of a reply that the client does not read.
    `read_json_body` limits the time of a body that is read.
    """

    limits = ConnectionLimits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timed_part = AwaitedPart.NOTHING
        self._receive_timer = _OneShotTimer(self.loop)
        self._send_timer = _OneShotTimer(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection. If there are too many, an idle one is closed; if none is idle, this one is refused."""
        super().connection_made(transport)
        transport.max_size = MAX_READ  # type: ignore[attr-defined]
        if len(self.connections) > self.limits.connections and not self._close_idle_connection():
            message = f"{self.limits.connections:,} connections are in use: come again later"
            self._send_error(RequestRefused(503, message, "overloaded", {"retry-after": "1"}))
        self._update_timers()

    def data_received(self, data: bytes) -> None:
        """Handle bytes that have arrived."""
        if not self.transport.is_closing():  # otherwise it is the rest of a request that was refused
            super().data_received(data)
            self._update_timers()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no valid HTTP request, with the status that h11 names: 400, or another. Overrides
        uvicorn's.
        """
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            message = f"the line and the headers must have at most {self.limits.head_bytes:,} bytes together"
        else:
            message = f"this is no HTTP request: {str(error)[:200]}"
        self._send_error(RequestRefused(status, message))

    def on_response_complete(self) -> None:
        """Wait for the next request of this connection."""
        super().on_response_complete()
        self._update_timers()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._update_timers()

    def pause_writing(self) -> None:
        """Start the time limit for a client that reads too slowly."""
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        """Stop the time limit: the client has read something."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._send_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of a closed connection."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._receive_timer.stop()
        self._send_timer.stop()

    def _update_timers(self) -> None:
        """Start or stop the timers to match what is awaited now. A timer that runs for the same part goes on."""
        part = self._awaited_part()
        if part is not self._timed_part:
            self._timed_part = part
            self._receive_timer.stop()
            if part is not AwaitedPart.NOTHING:
                self._receive_timer.start(self.limits.head_seconds, self._on_receive_timeout)
        if self.transport.is_closing():
            self._start_send_timer()

    def _awaited_part(self) -> AwaitedPart:
        """Return which part of a request the client must send now."""
        if self.transport.is_closing():
            return AwaitedPart.NOTHING
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            return AwaitedPart.REST
        idle = self.timeout_keep_alive_task is not None  # uvicorn limits this time
        return AwaitedPart.HEAD if self.conn.their_state is h11.IDLE and not idle else AwaitedPart.NOTHING

    def _on_receive_timeout(self) -> None:
        """Refuse or close a connection whose awaited part did not come in time."""
        has_received_bytes = bool(self.conn.trailing_data[0])
        if self._timed_part is AwaitedPart.HEAD and has_received_bytes:
            self._send_error(
                RequestRefused(408, f"a request's headers must be whole within {self.limits.head_seconds:g} s")
            )
        else:
            self.transport.close()
        self._update_timers()

    def _start_send_timer(self) -> None:
        """Start the timer that aborts the connection unless the client reads within `send_seconds`."""
        self._send_timer.start(self.limits.send_seconds, self.transport.abort)

    def _close_idle_connection(self) -> bool:
        """Close a connection that waits for its next request; return whether there was one."""
        for connection in self.connections:
            if isinstance(connection, LimitedConnection) and connection.timeout_keep_alive_task is not None:
                connection.timeout_keep_alive_handler()
                return True
        return False

    def _send_error(self, error: RequestRefused) -> None:
        """Send an error instead of the application's reply, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_body(error)
            body["error"] |= {"type": "server_error" if error.status == 503 else "invalid_request_error"}
            content = to_json_bytes(body)
            headers = {**error.headers, "content-type": "application/json", "content-length": str(len(content))}
            phrase = HTTPStatus(error.status).phrase
            head = h11.Response(
                status_code=error.status, reason=phrase, headers=[*headers.items(), ("connection", "close")]
            )
            for part in (head, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application has nobody to answer
            self.cycle.message_event.set()
        self.transport.close()


class _OneShotTimer:
    """Calls a function once after some time, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, callback: Callable[[], None]) -> None:
        """Start the timer. One that runs already goes on unchanged."""
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, callback)

    def stop(self) -> None:
        """Stop the timer, if it runs."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
