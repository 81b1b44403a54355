"""Calls that may never end, such as chat templates that loop, on threads that callers can abandon."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from cortexmlx.core.deadlines import check_timeout
from cortexmlx.errors import RequestTimeout

T = TypeVar("T")


class GivenUp(SystemExit):
    """Thrown at the thread of a call that nobody waits for any more. threading ends such a thread silently."""


class InterruptibleCall(Generic[T]):
    """A call on a daemon thread of its own. `interrupt` throws `GivenUp` at it, between two steps of Python."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._results: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> T:
        """Return or raise what the call does. Raises queue.Empty after `seconds`. A call that is no longer waited for
        is interrupted.
        """
        try:
            value, error = self._results.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except BaseException:
            self.interrupt()
            raise
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # there is one where there is no error

    def interrupt(self) -> None:
        """End the call, unless it has ended. Safe from any thread, and to call again."""
        with self._lock:  # the thread cannot end meanwhile, so its number is not another thread's
            if not self._over:
                self._over = True
                number = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(GivenUp))

    def _run(self) -> None:
        try:
            try:
                self._results.put((self._call(), None))
            except BaseException as error:
                self._results.put((None, error))
        finally:
            with self._lock:
                self._over = True


def read_with_timeout(seconds: float | None, read: Callable[[], T]) -> T:
    """Return what `read` makes of a prompt within `seconds`. None: without a limit, on the caller's thread.

    Raises RequestTimeout, InvalidRequest if `seconds` is no number of seconds, and what `read` raises.
    """
    check_timeout(seconds)
    if seconds is None:
        return read()
    try:
        return InterruptibleCall(read, "cortexmlx-prompt").result(seconds)
    except queue.Empty:
        raise RequestTimeout(
            f"the prompt was not made into tokens after {seconds:g} s, so the request was not queued: the model's chat "
            "template loops, or the prompt is very long. Give it more time, or a plain text (--raw)"
        ) from None
