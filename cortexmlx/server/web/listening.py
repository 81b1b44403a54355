"""An application on an address of this machine, from the first request to the last."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cortexmlx.errors import CortexError


class Listening:
    """Answers on a socket of `bound` while `run` runs. `stop`, SIGINT and SIGTERM end it: no new requests are taken,
    those that run get `grace` seconds.
    """

    def __init__(self, application: Any, bound: socket.socket, grace: float = 10.0) -> None:
        import uvicorn

        self._socket = bound
        self.url = _url(bound)
        """The address, for programs on this machine."""
        listening = self
        # uvicorn counts whole seconds, and 0 would be for ever.
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(grace)),
        )

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                with listening._signals():
                    yield

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
