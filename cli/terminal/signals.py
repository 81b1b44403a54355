"""Ctrl-C, Ctrl-Z and the signals that end a chat."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.exits import INTERRUPTED, leave_now
from cortexmlx.cli.terminal.region import END, ERASE_BELOW, SHOW, WRAP

GONE = "\r" + END + WRAP + ERASE_BELOW
PASTE_MARKED, PASTE_PLAIN = "\x1b[?2004h", "\x1b[?2004l"


class Suspension:
    """A handler of Ctrl-Z that restores the terminal for the shell while the program is stopped. Make it while the
    terminal is as the shell left it.

    The handler runs between any two statements of the main thread. So it writes past Python's buffers, and relies on
    how regions draw: the cursor rests where only temporary rows are below it, and where a frame begins.
    """

    def __init__(self) -> None:
        self._drawing: list[AbstractContextManager[object]] = []
        self._usual = self._modes()
        self._pretty = console.is_terminal(sys.stdout)

    @contextmanager
    def waiting_for(self, lock: AbstractContextManager[object]) -> Iterator[None]:
        """Do not stop the program in this context while another thread holds the lock. The main thread may take it
        twice.
        """
        self._drawing.append(lock)
        try:
            yield
        finally:
            self._drawing.remove(lock)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Stop, as the handler of SIGTSTP, and continue as before afterwards. If the program continues in the
        background, the kernel stops it again, since it uses the terminal.
        """
        with ExitStack() as held:
            for lock in self._drawing:
                held.enter_context(lock)
            own = self._modes()
            self._set(self._usual)
            self._write(GONE + SHOW + PASTE_PLAIN)
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_kill(threading.get_ident(), number)
            signal.signal(number, self.handle)
            self._set(own)
            if own != self._usual:  # keys are read here
                self._write(PASTE_MARKED)
        signal.raise_signal(signal.SIGWINCH)  # the window may have changed; this also redraws a prompt

    def clear(self) -> None:
        """Erase the temporary rows, because the program ends at once."""
        if self._drawing:
            self._write(GONE)

    def _write(self, controls: str) -> None:
        if self._pretty:
            with suppress(OSError):
                os.write(sys.stdout.fileno(), controls.encode())

    @staticmethod
    def _modes() -> list[Any] | None:
        try:
            return termios.tcgetattr(0)
        except termios.error:
            return None

    @staticmethod
    def _set(modes: list[Any] | None) -> None:
        if modes is not None:
            with suppress(termios.error):  # the terminal may have gone
                termios.tcsetattr(0, termios.TCSADRAIN, modes)


TWICE_SECONDS = 1.0


class Interrupts:
    """A counter of Ctrl-C. The functions `at_leave` clean up before the program ends at once. `away` handles the time
    in which Ctrl-Z has stopped the program.
    """

    def __init__(self) -> None:
        self.at_leave: list[Callable[[], None]] = []
        self.away = Suspension()
        self._last = float("-inf")
        self._stop: Callable[[], None] | None = None

    def again(self) -> bool:
        """Count a Ctrl-C. Return whether the last one was less than a second ago."""
        now = time.monotonic()
        since, self._last = now - self._last, now
        return since < TWICE_SECONDS

    @contextmanager
    def calling(self, stop: Callable[[], None]) -> Iterator[None]:
        """Let the first Ctrl-C call `stop` in this context. Elsewhere it raises KeyboardInterrupt."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.again():
            self._leave(INTERRUPTED)
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that ends the program."""
        self._leave(128 + number)

    def _leave(self, code: int) -> NoReturn:
        for undo in (*self.at_leave, self.away.clear):
            with suppress(Exception):  # the terminal may have gone
                undo()
        leave_now(code)


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Count Ctrl-C in this context. A signal that ends or stops the program leaves the terminal as it was."""
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
