"""Threads that own mlx, and never end.

When a thread that ran compiled mlx functions ends, mlx destroys that thread's compile cache, which needs the
interpreter. If the interpreter is shutting down by then, the process aborts. `join` does not help, because it returns
before the C++ part of the thread is over. So a thread that has done its work waits here for more work, and the next
engine takes it. At the end of the program, Python ends every thread that asks for the interpreter again, even between
two instructions. So all these threads are sent to a place where they no longer need it (`_leave_the_interpreter`).

Python lets any thread throw an exception at any other (`PyThreadState_SetAsyncExc`). It lands between two instructions:
for example after a function has returned, before its value has a name. So the next task is in an attribute and not in a
queue that is read once. Locks are plain ones, whose `with` is not interrupted between taking and entering. A task that
raised is called again until it returns.

A forked child has neither these threads nor mlx's own. One of them may have been changing an object of mlx when the
child was made, and a destructor that meets it half changed aborts (the C library then reports a double free). So the
child ends without the destructors of C++, where the platform lets it (`_skip_destructors`).
"""

from __future__ import annotations

import atexit
import ctypes
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
"""Nested loops around a thread's work, each with a few instructions outside of its `try`. With two of them, on a busy
machine, about one in 8,000 exceptions that were thrown every millisecond ended the thread.
"""

_AT_EXIT = 1.0
"""Seconds that the end of the program waits for threads that still work."""

_MORE_THAN_A_PIPE = 1 << 22
"""More bytes than a pipe can hold."""

_lock = threading.Lock()
_every: list[_Thread] = []
_parked: list[_Thread] = []
_mlx_is_lost = False


class Task:
    """A function that runs on an mlx thread: first as `run(None)`, then again with what it raised, until it returns."""

    def __init__(self, run: Callable[[BaseException | None], None]) -> None:
        self._run = run
        self._begun = self._over = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._thread: _Thread | None = None

    def start(self) -> None:
        """Start it, on a parked thread or a new one."""
        with _lock:
            if _parked:
                self._thread = _parked.pop()
                self._thread.take(self)
        if self._thread is None:
            self._thread = _Thread(self)
            self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has begun and has not ended."""
        return self._thread is not None and self._thread.is_alive() and not self._over

    def here(self) -> bool:
        """Return whether this is the task's own thread."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def join(self) -> None:
        """Wait for its end."""
        with self._gate:
            pass

    def carry_out(self, raised: BaseException | None) -> None:
        """Run the task to its end. The thread calls this, and again if it raised."""
        if not self._over:
            first, self._begun = not self._begun, True
            self._run(None if first else raised)
            self._over = True
        with suppress(RuntimeError):  # it is open already
            self._gate.release()

    def abandon(self) -> None:
        """Mark it as ended, because this is a forked child, which does not have its thread."""
        self._over = True
        self._gate = threading.Lock()


class _Thread(threading.Thread):
    """A thread that carries out one task after another for ever."""

    def __init__(self, task: Task) -> None:
        super().__init__(name="cortexmlx-engine", daemon=True)
        _every.append(self)
        self._task: Task | None = task
        self._raised: BaseException | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def take(self, task: Task) -> None:
        """Carry out `task` next. The caller has the lock, and has removed this thread from the parked ones."""
        self._task = task
        self._wake.put(None)

    def leave(self, until: float) -> None:
        """Have the thread wait for the end of the process outside of the interpreter. Return when it does, or at
        `until`.
        """
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
        """Remove this thread from the parked ones. Return whether it was parked."""
        with _lock:
            if parked := self in _parked:
                _parked.remove(self)
            return parked

    def run(self) -> None:
        self._survive(_LEVELS)

    def _survive(self, levels: int) -> None:
        """Work for ever. An exception that lands outside of one level's `try` is caught by the next outer level."""
        while True:
            try:
                if levels:
                    self._survive(levels - 1)
                else:
                    self._turn()
            except BaseException as error:
                self._raised = error

    def _turn(self) -> None:
        """Carry out the task, or wait for one."""
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
    """Raise ForkedProcess where mlx cannot run, because its threads are in another process."""
    if _mlx_is_lost:
        raise forked()


def forked() -> ForkedProcess:
    """Return the error for using mlx in a forked child."""
    return ForkedProcess(
        f"process {os.getpid()} was forked from one that uses mlx, whose threads are not in the child: start it with "
        'multiprocessing.get_context("spawn") and make the Engine there'
    )


def _write_for_ever(pipe: int) -> None:
    """Write more into a pipe than it holds. The thread has left the interpreter when the first byte arrives, and does
    not come back, since nobody reads the pipe.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which would interrupt it
    os.write(pipe, bytes(_MORE_THAN_A_PIPE))


@atexit.register
def _leave_the_interpreter() -> None:
    """Send all threads out of the interpreter at the end of the program. Its engines are closed by then, because Python
    calls the newest exit function first.
    """
    until = time.monotonic() + _AT_EXIT
    for thread in _every:
        with suppress(OSError):  # no pipe is left
            thread.leave(until)


def _in_child() -> None:
    """Begin again without threads. Another thread may have held the lock. Nobody can tell whether the parent only
    imported mlx or used it.
    """
    global _lock, _mlx_is_lost
    _lock = threading.Lock()
    _parked.clear()
    _every.clear()
    if not _mlx_is_lost and "mlx.core" in sys.modules:
        _mlx_is_lost = True
        _skip_destructors()


def _skip_destructors() -> None:
    """Have the process end with its exit code when Python is finished, before what C and C++ registered for the end in
    the parent. Buffered output of C is written first. Only Linux can do this, with glibc's `on_exit`; elsewhere
    `os._exit` is the way to end a forked child.
    """
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):
        libc.on_exit(libc._exit, None)
        libc["__cxa_atexit"](libc.fflush, None, None)  # the last one registered is called first


os.register_at_fork(after_in_child=_in_child)
