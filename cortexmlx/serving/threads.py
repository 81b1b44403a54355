"""Threads that own mlx, and never end.

When a thread that ran compiled mlx functions ends, mlx destroys that thread's compile cache, which needs the
interpreter: if the interpreter is shutting down by then, the process aborts. `join` does not help, because it returns
before the C++ part of the thread is over. So a thread that has done its work waits here for more, and the next engine
takes it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_lock = threading.Lock()
_parked: list[_Thread] = []


class Task:
    """A function running on an mlx thread."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._done = threading.Event()
        self._thread: _Thread | None = None

    def start(self) -> None:
        """Begin, on a parked thread or a new one."""
        with _lock:
            self._thread = _parked.pop() if _parked else None
        if self._thread is None:
            self._thread = _Thread()
        self._thread.tasks.put(self)

    @property
    def running(self) -> bool:
        """It has begun and has not ended."""
        return self._thread is not None and not self._done.is_set()

    def here(self) -> bool:
        """This is the task's own thread."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def join(self) -> None:
        """Wait for its end."""
        self._done.wait()

    def carry_out(self) -> None:
        """Run to the end; called by the thread."""
        try:
            self._run()
        finally:
            self._done.set()


class _Thread(threading.Thread):
    """Carries out one task after another for ever."""

    def __init__(self) -> None:
        super().__init__(name="cortexmlx-engine", daemon=True)
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.tasks.get().carry_out()
            with _lock:
                _parked.append(self)
