"""Heartbeats over a connection of their own, so that no large message delays them. Without mlx.

A heartbeat is the processor time that its process has used so far: eight bytes, big-endian, in milliseconds.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from enum import Enum, auto

BEAT = struct.Struct(">Q")


class Lost(Enum):
    SILENT = auto()
    """No heartbeat came in time."""
    ENDED = auto()
    """The connection ended, or this side shut it down."""


def beat_until_lost(
    pulse: socket.socket,
    beat_seconds: float,
    silence_seconds: float,
    heard_of: Callable[[float], None] = lambda processor_seconds: None,
) -> Lost:
    """Send a heartbeat each `beat_seconds`. Return when none came for `silence_seconds`, or the connection ended. Call
    `heard_of` with what the other side's heartbeats tell.
    """
    pulse.setblocking(False)
    unsent, rest = b"", b""
    readable = select.poll()
    readable.register(pulse, select.POLLIN)
    heard = next_beat = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_beat:
            next_beat = now + beat_seconds
            unsent = unsent or BEAT.pack(int(1000 * time.process_time()))
            try:
                unsent = unsent[pulse.send(unsent) :]
            except BlockingIOError:
                pass  # It takes no heartbeats, so it will send none.
            except OSError:
                return Lost.ENDED
        # The clock is read before the socket: if this process was stopped itself, the heartbeats of that time count.
        silent = now - heard >= silence_seconds
        if readable.poll(max(0.0, min(next_beat, heard + silence_seconds) - now) * 1000):
            try:
                came = pulse.recv(4096)
            except OSError:
                return Lost.ENDED
            if not came:
                return Lost.ENDED
            heard = time.monotonic()
            rest += came
            if whole := len(rest) // BEAT.size * BEAT.size:
                heard_of(BEAT.unpack(rest[whole - BEAT.size : whole])[0] / 1000)
                rest = rest[whole:]
        elif silent:
            return Lost.SILENT
