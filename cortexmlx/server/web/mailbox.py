"""Mailbox: events of the engine's thread for many streams of an event loop, with one wake-up for all that come
together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from cortexmlx.types.request import TokenEvent

Deliver = Callable[[TokenEvent], None]


class Mailbox:
    """Hands events from the engine's thread to an event loop. The engine never waits for the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Deliver, TokenEvent]] = deque()
        self._woken = False
        self.wakeups = 0
        """How often the loop was woken."""

    def put(self, deliver: Deliver, event: TokenEvent) -> None:
        """Have the loop call `deliver(event)`. Called on the engine's thread."""
        self._waiting.append((deliver, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # before the first event is taken: what is put after that wakes the loop again
        self.wakeups += 1
        while self._waiting:
            deliver, event = self._waiting.popleft()
            deliver(event)
