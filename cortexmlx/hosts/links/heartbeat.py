"""Heartbeats over a connection of their own, so that no large message delays them. Without mlx."""

from __future__ import annotations

import select
import socket
import time
from enum import Enum, auto

BEAT = b"."


class Lost(Enum):
    SILENT = auto()
    """No heartbeat came in time."""
    ENDED = auto()
    """The connection ended, or this side shut it down."""


def beat_until_lost(pulse: socket.socket, beat_seconds: float, silence_seconds: float) -> Lost:
    """Send a heartbeat each `beat_seconds`. Return when none came for `silence_seconds`, or the connection ended."""
    pulse.setblocking(False)
    readable = select.poll()
    readable.register(pulse, select.POLLIN)
    heard = next_beat = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= next_beat:
            next_beat = now + beat_seconds
            try:
                pulse.send(BEAT)
            except BlockingIOError:
                pass  # It takes no heartbeats, so it will send none.
            except OSError:
                return Lost.ENDED
        # The clock is read before the socket: if this process was stopped itself, the heartbeats of that time count.
        silent = now - heard >= silence_seconds
        if readable.poll(max(0.0, min(next_beat, heard + silence_seconds) - now) * 1000):
            try:
                if not pulse.recv(4096):
                    return Lost.ENDED
            except OSError:
                return Lost.ENDED
            heard = time.monotonic()
        elif silent:
            return Lost.SILENT
