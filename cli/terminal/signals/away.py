"""Ctrl-Z: stop the chat and give the terminal to the shell, until `fg`."""

from __future__ import annotations

import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.region import END, ERASE_BELOW, SHOW, WRAP

GONE = "\r" + END + WRAP + ERASE_BELOW
PASTE_MARKED, PASTE_PLAIN = "\x1b[?2004h", "\x1b[?2004l"


class Away:
    """What a shell wants of the terminal while a program is stopped, made when that is still as the shell gave it.

    The handler runs between any two statements of the main thread. So it writes past Python's buffers, and relies on
    what is drawn: where the cursor rests, only what comes and goes is below it, and a frame begins there.
    """

    def __init__(self) -> None:
        self._drawing: list[AbstractContextManager[object]] = []
        self._usual = self._modes()
        self._pretty = console.is_terminal(sys.stdout)

    @contextmanager
    def waiting_for(self, lock: AbstractContextManager[object]) -> Iterator[None]:
        """In this context nobody is stopped while another thread holds the lock. The main thread may take it twice."""
        self._drawing.append(lock)
        try:
            yield
        finally:
            self._drawing.remove(lock)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """As the handler of SIGTSTP: stop, and when that is over, go on as before. In the background the kernel stops
        it again, since it wants the terminal.
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
        signal.raise_signal(signal.SIGWINCH)  # the window may be another, and a prompt is drawn anew by it

    def clear(self) -> None:
        """The program ends at once: nothing stays of what comes and goes."""
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
            with suppress(termios.error):  # of a terminal that has gone
                termios.tcsetattr(0, termios.TCSADRAIN, modes)
