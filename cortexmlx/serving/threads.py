"""Threads that own mlx, and never end.

When a thread that ran compiled mlx functions ends, mlx destroys that thread's compile cache, which needs the
interpreter: if the interpreter is shutting down by then, the process aborts. `join` does not help, because it returns
before the C++ part of the thread is over. So a thread that has done its work waits here for more, and the next engine
takes it. At the end of the program Python ends every thread that asks for the interpreter once more, and be it between
two instructions; so all of them are sent to where they need it no more (`_leave_the_interpreter`).

Python lets any thread throw an exception at any other (`PyThreadState_SetAsyncExc`), which lands between two
instructions: after a function has returned, before its value has a name. So what a thread has to do lies in an
attribute and not in a queue that is read once, locks are plain ones, whose `with` is not interrupted between taking and
entering, and a task that raised is begun again until it returns.

A forked child has none of these threads, nor mlx's own.
"""

from __future__ import annotations

import atexit
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from cortexmlx.errors import ForkedProcess

_LEVELS = 8
"""Loops around a thread's turn, each with a few instructions outside of its `try`. With two of them, on a busy machine,
about one in 8,000 exceptions that were thrown every millisecond ended the thread.
"""

_AT_EXIT = 1.0
"""Seconds that the end of the program waits for threads that are still at work."""

_MORE_THAN_A_PIPE = 1 << 22
"""Bytes that a pipe cannot hold."""

_lock = threading.Lock()
_every: list[_Thread] = []
_parked: list[_Thread] = []
_mlx_is_lost = False


class Task:
    """A function that runs on an mlx thread: first `run(None)`, then again with what it raised, until it returns."""

    def __init__(self, run: Callable[[BaseException | None], None]) -> None:
        self._run = run
        self._begun = self._over = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._thread: _Thread | None = None

    def start(self) -> None:
        """Begin, on a parked thread or a new one."""
        with _lock:
            if _parked:
                self._thread = _parked.pop()
                self._thread.take(self)
        if self._thread is None:
            self._thread = _Thread(self)
            self._thread.start()

    @property
    def running(self) -> bool:
        """It has begun and has not ended."""
        return self._thread is not None and self._thread.is_alive() and not self._over

    def here(self) -> bool:
        """This is the task's own thread."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def join(self) -> None:
        """Wait for its end."""
        with self._gate:
            pass

    def carry_out(self, raised: BaseException | None) -> None:
        """Run to the end; called by the thread, and again if that raised."""
        if not self._over:
            first, self._begun = not self._begun, True
            self._run(None if first else raised)
            self._over = True
        with suppress(RuntimeError):  # it is open already
            self._gate.release()

    def abandon(self) -> None:
        """It is over, because this is a forked child and its thread is not here."""
        self._over = True
        self._gate = threading.Lock()


class _Thread(threading.Thread):
    """Carries out one task after another for ever."""

    def __init__(self, task: Task) -> None:
        super().__init__(name="cortexmlx-engine", daemon=True)
        _every.append(self)
        self._task: Task | None = task
        self._raised: BaseException | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def take(self, task: Task) -> None:
        """Carry out `task` next. The caller has the lock, and has taken this thread from the parked ones."""
        self._task = task
        self._wake.put(None)

    def leave(self, until: float) -> None:
        """Have it wait outside of the interpreter for the end of the process. Returns when it does, or at `until`."""
        while not self._is_taken():
            if time.monotonic() > until:
                return
            time.sleep(0.001)
        reader, writer = os.pipe()
        self.take(Task(lambda raised: _write_for_ever(writer)))
        begun = select.poll()
        begun.register(reader, select.POLLIN)
        begun.poll(1000 * _AT_EXIT)

    def _is_taken(self) -> bool:
        """It was parked, and is not any more."""
        with _lock:
            if parked := self in _parked:
                _parked.remove(self)
            return parked

    def run(self) -> None:
        self._survive(_LEVELS)

    def _survive(self, levels: int) -> None:
        """Take turns for ever. What lands outside of the `try` of one level is caught by the next one out."""
        while True:
            try:
                if levels:
                    self._survive(levels - 1)
                else:
                    self._turn()
            except BaseException as error:
                self._raised = error

    def _turn(self) -> None:
        """Carry out the task that there is, or wait for one."""
        if self._task is not None:
            raised, self._raised = self._raised, None
            self._task.carry_out(raised)
            self._task = raised = None  # whoever waits here keeps no traceback, nor what its frames hold
        with _lock:
            if self._task is None and self not in _parked:
                _parked.append(self)
        if self._task is None:
            self._wake.get()


def require_mlx_threads() -> None:
    """Raise ForkedProcess where mlx cannot run, because its threads stayed behind in another process."""
    if _mlx_is_lost:
        raise forked()


def forked() -> ForkedProcess:
    """The error of everybody who asks for mlx in a forked child."""
    return ForkedProcess(
        f"process {os.getpid()} was forked from one that uses mlx, whose threads are not in the child: start it with "
        'multiprocessing.get_context("spawn") and make the Engine there'
    )


def _write_for_ever(pipe: int) -> None:
    """Whoever writes more into a pipe than that holds has left the interpreter when the first byte is there, and does
    not come back, since nobody reads it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which would interrupt it
    os.write(pipe, bytes(_MORE_THAN_A_PIPE))


@atexit.register
def _leave_the_interpreter() -> None:
    """The program ends, and its engines are closed: Python calls what was registered later first."""
    until = time.monotonic() + _AT_EXIT
    for thread in _every:
        with suppress(OSError):  # no pipe is left
            thread.leave(until)


def _in_child() -> None:
    """Another thread may have held the lock. Whether the parent only imported mlx or used it cannot be found out."""
    global _lock, _mlx_is_lost
    _lock = threading.Lock()
    _parked.clear()
    _every.clear()
    _mlx_is_lost = _mlx_is_lost or "mlx.core" in sys.modules


os.register_at_fork(after_in_child=_in_child)
