"""Handlers of Ctrl-C, Ctrl-Z and the signals that end a chat."""

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
from cortexmlx.cli.terminal.exits import INTERRUPTED, exit_immediately
from cortexmlx.cli.terminal.harmless import strip_controls
from cortexmlx.cli.terminal.region import END, ERASE_BELOW, SHOW, WRAP

ERASE_REGION = "\r" + END + WRAP + ERASE_BELOW
PASTE_MARKED, PASTE_PLAIN = "\x1b[?2004h", "\x1b[?2004l"


class SuspendHandler:
    """Handles Ctrl-Z: restores the terminal for the shell while the program is stopped. Make it while the terminal is
    as the shell left it.

    The handler runs between any two statements of the main thread. So it writes past Python's buffers, and relies on
    how regions draw: the cursor rests where only temporary rows are below it, and where a frame begins.
    """

    def __init__(self) -> None:
        self._drawing_locks: list[AbstractContextManager[object]] = []
        self._shell_modes = self._terminal_modes()
        self._pretty = console.is_terminal(sys.stdout)

    @contextmanager
    def wait_for_lock(self, lock: AbstractContextManager[object]) -> Iterator[None]:
        """Have Ctrl-Z wait in this context until no other thread has `lock`. The main thread may take it twice."""
        self._drawing_locks.append(lock)
        try:
            yield
        finally:
            self._drawing_locks.remove(lock)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Stop the program, as the handler of SIGTSTP, and restore its terminal when it continues. If it continues in
        the background, the kernel stops it again, since it uses the terminal.
        """
        with ExitStack() as stack:
            for lock in self._drawing_locks:
                stack.enter_context(lock)
            program_modes = self._terminal_modes()
            self._set_modes(self._shell_modes)
            self._write_control(ERASE_REGION + SHOW + PASTE_PLAIN)
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_kill(threading.get_ident(), number)
            signal.signal(number, self.handle)
            self._set_modes(program_modes)
            if program_modes != self._shell_modes:  # keys are read here
                self._write_control(PASTE_MARKED)
        signal.raise_signal(signal.SIGWINCH)  # the window may have changed; this also redraws a prompt

    def erase_region(self) -> None:
        """Erase the temporary rows and turn bracketed paste off, because the program is about to end."""
        self._write_control((ERASE_REGION if self._drawing_locks else "") + PASTE_PLAIN)

    def write_line(self, text: str) -> None:
        """Write a line, if `text` is not empty, past the buffer of a print that a signal has interrupted."""
        self._write_control(f"{strip_controls(text)}\n" if text else "")

    def _write_control(self, controls: str) -> None:
        """Write control sequences past Python's buffers."""
        if self._pretty:
            with suppress(OSError):
                os.write(sys.stdout.fileno(), controls.encode())

    @staticmethod
    def _terminal_modes() -> list[Any] | None:
        """Return the terminal's modes; None without a terminal."""
        try:
            return termios.tcgetattr(0)
        except termios.error:
            return None

    @staticmethod
    def _set_modes(modes: list[Any] | None) -> None:
        if modes is not None:
            with suppress(termios.error):  # the terminal may have gone
                termios.tcsetattr(0, termios.TCSADRAIN, modes)


TWICE_SECONDS = 1.0


class InterruptHandler:
    """Handles Ctrl-C in a chat: the first stops an answer, a second soon after ends the program. The functions
    `at_leave` clean up before that. `suspend_handler` handles Ctrl-Z.
    """

    def __init__(self) -> None:
        self.at_leave: list[Callable[[], None]] = []
        self.suspend_handler = SuspendHandler()
        self._last = float("-inf")
        self._stop: Callable[[], None] | None = None

    def count_interrupt(self) -> bool:
        """Count a Ctrl-C. Return whether the last one was less than a second ago."""
        now = time.monotonic()
        since, self._last = now - self._last, now
        return since < TWICE_SECONDS

    @contextmanager
    def call_on_interrupt(self, stop: Callable[[], None]) -> Iterator[None]:
        """Let the first Ctrl-C call `stop` in this context. Elsewhere it raises KeyboardInterrupt."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: stop the answer, raise KeyboardInterrupt, or end the program at the second one."""
        if self.count_interrupt():
            self._clean_up_and_exit(INTERRUPTED)
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()

    def exit_on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a terminating signal: clean up, and end the program."""
        self._clean_up_and_exit(128 + number)

    def _clean_up_and_exit(self, code: int) -> NoReturn:
        """Run the cleanup functions and end the program."""
        for undo in (*self.at_leave, self.suspend_handler.erase_region):
            with suppress(Exception):  # the terminal may have gone
                undo()
        exit_immediately(code)


@contextmanager
def handle_signals() -> Iterator[InterruptHandler]:
    """Handle Ctrl-C, Ctrl-Z and terminating signals in this context; restore the terminal before an end or a stop."""
    presses = InterruptHandler()
    old_handlers = {signal.SIGINT: signal.signal(signal.SIGINT, presses.handle)}
    handlers = {
        signal.SIGTERM: presses.exit_on_signal,
        signal.SIGHUP: presses.exit_on_signal,
        signal.SIGTSTP: presses.suspend_handler.handle,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_DFL:  # with nohup, or no job control, it is ignored
            old_handlers[number] = signal.signal(number, handler)
    try:
        yield presses
    finally:
        for number, old_handler in old_handlers.items():
            signal.signal(number, old_handler)
