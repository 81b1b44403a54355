"""Runs blocking work on threads for asyncio, so that the event loop does not wait for it."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from cortexmlx.core.deadlines import checked_timeout
from cortexmlx.errors import RequestTimeout


class Closable(Protocol):
    """Something that can be closed."""

    def close(self) -> None:
        """Close it. Safe to call again."""


T = TypeVar("T")
C = TypeVar("C", bound=Closable)
P = ParamSpec("P")


class AsyncOpening(Generic[C]):
    """Opens an object with `make`, on a thread. `await` it, or use it in `async with`, which closes the object at the
    end.

    If the task is cancelled meanwhile, it does not wait; what is opened then is closed.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._instance: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        return run_on_thread(self._make, lambda opened: opened.close()).__await__()

    async def __aenter__(self) -> C:
        self._instance = await self
        return self._instance

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._instance is not None:
            await run_on_thread(self._instance.close)


def make_async_open(init: Callable[Concatenate[C, P], None]) -> Callable[Concatenate[type[C], P], AsyncOpening[C]]:
    """Return an async class method `open` with the parameters of the constructor `init`."""

    @functools.wraps(init)
    def open(cls: type[C], /, *args: P.args, **options: P.kwargs) -> AsyncOpening[C]:
        """Open an instance without blocking the event loop: `await` this, or use it in `async with`."""
        return AsyncOpening(lambda: cls(*args, **options))

    open.__name__ = "open"
    return open


def warn_if_blocking(name: str, other_name: str) -> bool:
    """Warn if this thread runs an event loop, which calling `name` blocks and `other_name` does not. In a notebook,
    where the user waits anyway, there is no warning. Return whether there is a running loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    if "ipykernel" not in sys.modules:
        text = f"{name} holds up this thread's event loop until the answer is there: await {other_name}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return True


async def run_on_thread(
    work: Callable[[], T], undo: Callable[[T], object] = lambda result: None, *, interruptible: bool = False
) -> T:
    """Run `work` on a daemon thread of its own, and return its result or raise its error. Neither the event loop nor
    the end of the program is held up.

    If the task is cancelled meanwhile, `undo` is called with the result, also on a thread. `interruptible` work ends
    instead, between two of Python's instructions; what it has done so far must not matter.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_result(result: T) -> None:
        if future.done():
            _start_call(lambda: undo(result))
        else:
            future.set_result(result)

    def set_error(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def run_work() -> None:
        try:
            result = work()
        except BaseException as error:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(set_error, error)
            return
        try:
            loop.call_soon_threadsafe(set_result, result)
        except RuntimeError:
            undo(result)

    call = _start_call(run_work)
    try:
        return await future
    except asyncio.CancelledError:
        if interruptible:
            call.interrupt()
        if future.done() and not future.cancelled() and future.exception() is None:
            result = future.result()
            _start_call(lambda: undo(result))
        raise


def _start_call(work: Callable[[], object]) -> InterruptibleCall[object]:
    """Start `work` on a daemon thread."""
    return InterruptibleCall(work, "cortexmlx-async")


# Calls that may never end, such as chat templates that loop, on threads that callers can abandon.


class CallInterrupted(SystemExit):
    """Thrown at the thread of a call whose caller no longer waits for it. threading ends such a thread silently."""


class InterruptibleCall(Generic[T]):
    """A call on a daemon thread of its own, which `interrupt` can end between two bytecode instructions."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._results: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, seconds: float) -> T:
        """Return the result. Raises the call's error, or queue.Empty after `seconds`. Giving up interrupts the call."""
        try:
            value, error = self._results.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except BaseException:
            self.interrupt()
            raise
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # there is one where there is no error

    def interrupt(self) -> None:
        """End the call if it still runs. Safe from any thread, and to call again."""
        with self._lock:  # the thread cannot end meanwhile, so its number is not another thread's
            if not self._has_ended:
                self._has_ended = True
                number = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(CallInterrupted))

    def _run(self) -> None:
        """Make the call, and queue its result or its error. The thread runs this."""
        try:
            try:
                self._results.put((self._call(), None))
            except BaseException as error:
                self._results.put((None, error))
        finally:
            with self._lock:
                self._has_ended = True


def tokenize_with_timeout(seconds: float | None, tokenize: Callable[[], T]) -> T:
    """Return the result of `tokenize`, run for at most `seconds`. None: without a limit, on the caller's thread.

    Raises RequestTimeout, InvalidRequest if `seconds` is no number of seconds, and what `tokenize` raises.
    """
    seconds = checked_timeout(seconds)
    if seconds is None:
        return tokenize()
    try:
        return InterruptibleCall(tokenize, "cortexmlx-prompt").result(seconds)
    except queue.Empty:
        raise RequestTimeout(
            f"the prompt was not made into tokens after {seconds:g} s, so the request was not queued: the model's chat "
            "template loops, or the prompt is very long. Give it more time, or a plain text (--raw)"
        ) from None
