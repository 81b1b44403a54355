"""Visitor: a connection to the controller whose other side is not known yet. Without mlx."""

from __future__ import annotations

import socket

from cortexmlx.distributed.links.handshake import Hello, StrangerError, StrangerKind, Talk


class Visitor:
    """Carries the bytes of one handshake, on a non-blocking socket. It holds a few kilobytes at most."""

    def __init__(self, connection: socket.socket, host: str, deadline: float, talk: Talk[Hello]) -> None:
        """`deadline`: of `time.monotonic`, for the whole handshake, however often something comes."""
        connection.setblocking(False)
        self.connection = connection
        self.host = host
        self.deadline = deadline
        self._talk = talk
        self._read = b""
        self._wanted = 0
        self._hello: Hello | None = None
        self._advance(None)

    def read(self) -> Hello | None:
        """Go on with what has arrived. Return the hello if the handshake is complete. Raises StrangerError, OSError."""
        while self._hello is None:
            try:
                # Never more than is wanted: what follows the handshake belongs to the link.
                data = self.connection.recv(self._wanted - len(self._read))
            except BlockingIOError:
                return None
            if not data:
                raise StrangerError(StrangerKind.LEFT)
            self._read += data
            if len(self._read) == self._wanted:
                whole, self._read = self._read, b""
                self._advance(whole)
        return self._hello

    def _advance(self, given: bytes | None) -> None:
        try:
            wish = next(self._talk) if given is None else self._talk.send(given)
            while isinstance(wish, bytes):
                # It fits into the empty send buffer of the system, or the other side plays games.
                if self.connection.send(wish) < len(wish):
                    raise StrangerError(StrangerKind.SLOW)
                wish = next(self._talk)
            self._wanted = wish
        except BlockingIOError:
            raise StrangerError(StrangerKind.SLOW) from None
        except StopIteration as end:
            self._hello = end.value
