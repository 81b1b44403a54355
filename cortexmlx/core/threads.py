"""Threads that may use mlx. They are reused and never end, since mlx's state belongs to its thread.

When a thread that ran compiled mlx functions ends, mlx destroys that thread's compile cache, which needs the
interpreter. If the interpreter is shutting down by then, the process aborts. `join` does not help, because it returns
before the C++ part of the thread is over. So a thread that has done its work waits here for more work, and the next
engine takes it. At the end of the program, Python ends every thread that asks for the interpreter again, even between
two instructions. So all these threads are sent to a place where they no longer need it (`_leave_interpreter_at_exit`).

Python lets any thread throw an exception at any other (`PyThreadState_SetAsyncExc`). It lands between two instructions:
for example after a function has returned, before its value has a name. So the next task is in an attribute and not in a
queue that is read once. Locks are plain ones, whose `with` is not interrupted between taking and entering. A task that
raised is called again until it returns.

A forked child has neither these threads nor mlx's own. One of them may have been changing an object of mlx when the
child was made, and a destructor that meets it half changed aborts (the C library then reports a double free). So the
child ends without the destructors of C++, where the platform lets it (`_skip_exit_handlers`).
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
_all_threads: list[_MlxThread] = []
_parked: list[_MlxThread] = []
_mlx_is_lost = False


class MlxTask:
    """A function for an mlx thread: called as `run(None)`, then with each exception it raises, until it returns."""

    def __init__(self, run: Callable[[BaseException | None], None]) -> None:
        self._run = run
        self._has_started = self._has_ended = False
        self._end_lock = threading.Lock()
        self._end_lock.acquire()
        self._thread: _MlxThread | None = None

    def start(self) -> None:
        """Run the function on a parked thread or a new one."""
        with _lock:
            if _parked:
                self._thread = _parked.pop()
                self._thread.assign(self)
        if self._thread is None:
            self._thread = _MlxThread(self)
            self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the function has begun and has not ended."""
        return self._thread is not None and self._thread.is_alive() and not self._has_ended

    def is_current_thread(self) -> bool:
        """Return whether the caller is on the task's own thread."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def join(self) -> None:
        """Wait until the function has ended."""
        with self._end_lock:
            pass

    def carry_out(self, previous_error: BaseException | None) -> None:
        """Run the function to its end. Its thread calls this, and calls it again with each error that it raised."""
        if not self._has_ended:
            first, self._has_started = not self._has_started, True
            self._run(None if first else previous_error)
            self._has_ended = True
        with suppress(RuntimeError):  # it is open already
            self._end_lock.release()

    def abandon(self) -> None:
        """Mark the task as ended in a forked child, which does not have its thread."""
        self._has_ended = True
        self._end_lock = threading.Lock()


class _MlxThread(threading.Thread):
    """A thread that carries out one task after another and never ends."""

    def __init__(self, task: MlxTask) -> None:
        super().__init__(name="cortexmlx-engine", daemon=True)
        _all_threads.append(self)
        self._task: MlxTask | None = task
        self._previous_error: BaseException | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def assign(self, task: MlxTask) -> None:
        """Have the thread run `task` next. The caller has the lock, and has removed the thread from the parked ones."""
        self._task = task
        self._wake.put(None)

    def leave_interpreter(self, deadline: float) -> None:
        """Have the thread wait for the process's end in a system call. Return once it waits there, or at `deadline`."""
        while not self._unpark():
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        reader, writer = os.pipe()
        self.assign(MlxTask(lambda raised: _block_on_pipe(writer)))
        poller = select.poll()
        poller.register(reader, select.POLLIN)
        poller.poll(1000 * _AT_EXIT)

    def _unpark(self) -> bool:
        """Remove this thread from the parked ones. Return whether it was among them."""
        with _lock:
            if was_parked := self in _parked:
                _parked.remove(self)
            return was_parked

    def run(self) -> None:
        self._run_for_ever(_LEVELS)

    def _run_for_ever(self, levels: int) -> None:
        """Carry out tasks for ever. An exception outside of one level's `try` is caught by the next outer level."""
        while True:
            try:
                if levels:
                    self._run_for_ever(levels - 1)
                else:
                    self._run_or_wait()
            except BaseException as error:
                self._previous_error = error

    def _run_or_wait(self) -> None:
        """Carry out the task if there is one, else park and wait for one."""
        if self._task is not None:
            previous_error, self._previous_error = self._previous_error, None
            self._task.carry_out(previous_error)
            self._task = previous_error = None  # whoever waits here keeps no traceback, nor what its frames hold
        with _lock:
            if self._task is None and self not in _parked:
                _parked.append(self)
        if self._task is None:
            self._wake.get()


def require_mlx_threads() -> None:
    """Raise ForkedProcess in a forked child, where mlx cannot run without its threads."""
    if _mlx_is_lost:
        raise forked_process_error()


def forked_process_error() -> ForkedProcess:
    """Return the error for using mlx in a forked child."""
    return ForkedProcess(
        f"process {os.getpid()} was forked from one that uses mlx, whose threads are not in the child: start it with "
        'multiprocessing.get_context("spawn") and make the Engine there'
    )


def _block_on_pipe(pipe: int) -> None:
    """Block in a write of more than a pipe holds. The thread has left the interpreter when the first byte arrives, and
    does not come back, since nobody reads the pipe.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # which would interrupt it
    os.write(pipe, bytes(_MORE_THAN_A_PIPE))


@atexit.register
def _leave_interpreter_at_exit() -> None:
    """Make threads leave the interpreter at exit. Engines are closed before: the newest exit function runs first."""
    deadline = time.monotonic() + _AT_EXIT
    for thread in _all_threads:
        with suppress(OSError):  # no pipe is left
            thread.leave_interpreter(deadline)


def _reset_after_fork() -> None:
    """Forget all threads in a forked child, and make a new lock, since another thread may have held it. Nobody can
    tell whether the parent only imported mlx or used it.
    """
    global _lock, _mlx_is_lost
    _lock = threading.Lock()
    _parked.clear()
    _all_threads.clear()
    if not _mlx_is_lost and "mlx.core" in sys.modules:
        _mlx_is_lost = True
        _skip_exit_handlers()


def _skip_exit_handlers() -> None:
    """Have a forked child skip the exit functions that C and C++ registered in the parent. It ends with its exit code
    once Python is finished and buffered output of C is written. Only Linux can do this, with glibc's `on_exit`;
    elsewhere `os._exit` is the way to end a forked child.
    """
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):
        libc.on_exit(libc._exit, None)
        libc["__cxa_atexit"](libc.fflush, None, None)  # the last one registered is called first


os.register_at_fork(after_in_child=_reset_after_fork)
