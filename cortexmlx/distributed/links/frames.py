"""FrameStream: whole messages over a non-blocking stream socket. Without mlx.

A frame is the message's length in eight bytes, big-endian, and the message.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from io import BytesIO

HEADER = struct.Struct(">Q")

ENDED = "ended or closed its connection"


class StreamBroken(Exception):
    """The stream can carry no more frames. The text says why, after the name of the other side."""


class FrameStream:
    """Sends and receives frames. One thread may send while another receives.

    After any exception the stream is at an unknown place in a frame, and must not be used again.
    """

    def __init__(self, connection: socket.socket, largest: int) -> None:
        """`largest`: bytes of the largest message, in both directions."""
        connection.setblocking(False)
        self._connection = connection
        self._largest = largest
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)

    def send(self, body: memoryview, stall_seconds: float) -> None:
        """Send a message. `body` is one-dimensional, of bytes. Raises StreamBroken if nothing of it is taken for
        `stall_seconds`.
        """
        if len(body) > self._largest:
            raise StreamBroken(f"would get a message of {len(body)} bytes, and {self._largest} are allowed")
        parts = [memoryview(HEADER.pack(len(body))), body]
        while parts:
            try:
                sent = self._connection.sendmsg(parts)
            except BlockingIOError:
                if not self._writable.poll(stall_seconds * 1000):
                    raise StreamBroken(f"took nothing of a message for {stall_seconds:g} s") from None
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def receive(self, timeout: float | None) -> bytes:
        """Wait for a whole message, at most `timeout` seconds. Raises StreamBroken."""
        deadline = None if timeout is None else time.monotonic() + timeout
        header = bytearray(HEADER.size)
        self._fill(memoryview(header), timeout, deadline)
        (length,) = HEADER.unpack(header)
        if length > self._largest:
            raise StreamBroken(f"announced a message of {length} bytes, and {self._largest} are allowed")
        # BytesIO gives a writable view of its bytes, and then the bytes themselves: a message is never copied.
        whole = BytesIO(bytes(length))
        with whole.getbuffer() as view:
            self._fill(view, timeout, deadline)
        return whole.getvalue()

    def _fill(self, view: memoryview, timeout: float | None, deadline: float | None) -> None:
        at = 0
        while at < len(view):
            try:
                count = self._connection.recv_into(view[at:])
            except BlockingIOError:
                left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
                if not self._readable.poll(left):
                    raise StreamBroken(f"sent no whole message within {timeout:g} s") from None
                continue
            if not count:
                raise StreamBroken(ENDED)
            at += count
