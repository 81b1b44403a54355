"""Ctrl-C as a chat needs it: the first stops what is going on, the second within a second ends the program."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from cortexmlx.cli.terminal.exits import leave_now

TWICE_SECONDS = 1.0


class Interrupts:
    """Counts Ctrl-C. `at_leave` are called before the program ends at once: what must not stay as it is."""

    def __init__(self) -> None:
        self.at_leave: list[Callable[[], None]] = []
        self._last = float("-inf")
        self._stop: Callable[[], None] | None = None

    def again(self) -> bool:
        """One more; True if the last was less than a second ago."""
        now = time.monotonic()
        since, self._last = now - self._last, now
        return since < TWICE_SECONDS

    @contextmanager
    def calling(self, stop: Callable[[], None]) -> Iterator[None]:
        """In this context the first Ctrl-C calls `stop`; elsewhere it raises KeyboardInterrupt."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """As a signal handler."""
        if self.again():
            for undo in self.at_leave:
                undo()
            leave_now()
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """In this context Ctrl-C is counted."""
    presses = Interrupts()
    before = signal.signal(signal.SIGINT, presses.handle)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)
