"""An application on an address of this machine, from the first request to the last."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from cortexmlx.errors import CortexError
from cortexmlx.server.web.connection import ConnectionLimits, limited

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
            http=limited(allowed),
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
