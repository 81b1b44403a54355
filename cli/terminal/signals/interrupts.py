"""Ctrl-C as a chat needs it: the first stops what is going on, the second within a second ends the program."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from cortexmlx.cli.terminal.exits import INTERRUPTED, leave_now
from cortexmlx.cli.terminal.signals.away import Away

TWICE_SECONDS = 1.0


class Interrupts:
    """Counts Ctrl-C. `at_leave` are called before the program ends at once: what must not stay as it is. `away` is for
    the time in which Ctrl-Z has stopped it.
    """

    def __init__(self) -> None:
        self.at_leave: list[Callable[[], None]] = []
        self.away = Away()
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
            self._leave(INTERRUPTED)
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()

    def end(self, number: int, frame: FrameType | None) -> None:
        """As the handler of a signal that ends the program."""
        self._leave(128 + number)

    def _leave(self, code: int) -> NoReturn:
        for undo in (*self.at_leave, self.away.clear):
            with suppress(Exception):  # the terminal may have gone
                undo()
        leave_now(code)


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """In this context Ctrl-C is counted, and a signal that ends or stops the program leaves the terminal as it was."""
    presses = Interrupts()
    before = {signal.SIGINT: signal.signal(signal.SIGINT, presses.handle)}
    handlers = {signal.SIGTERM: presses.end, signal.SIGHUP: presses.end, signal.SIGTSTP: presses.away.handle}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_DFL:  # with nohup, or no job control, it is ignored
            before[number] = signal.signal(number, handler)
    try:
        yield presses
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
