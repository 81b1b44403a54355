"""Work that would block an event loop, for asyncio: opening, closing and waiting, on threads of their own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from cortexmlx.core.interruptible import InterruptibleCall


class Closable(Protocol):
    """Something that can be opened and closed."""

    def close(self) -> None:
        """Close it. Safe to call again."""


T = TypeVar("T")
C = TypeVar("C", bound=Closable)
P = ParamSpec("P")


class Opening(Generic[C]):
    """Opens something with `make`, on a thread of its own. `await` it, or use it in `async with`, which closes it at
    the end.

    If the task is cancelled meanwhile, it does not wait; what is opened then is closed.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        self._opened: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        return on_a_thread(self._make, lambda opened: opened.close()).__await__()

    async def __aenter__(self) -> C:
        self._opened = await self
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await on_a_thread(self._opened.close)


def opens(init: Callable[Concatenate[C, P], None]) -> Callable[Concatenate[type[C], P], Opening[C]]:
    """Return a class method `open` with the parameters of the constructor `init`."""

    @functools.wraps(init)
    def open(cls: type[C], /, *args: P.args, **options: P.kwargs) -> Opening[C]:
        """Open one without holding up the event loop: `await` it, or use it in `async with`."""
        return Opening(lambda: cls(*args, **options))

    open.__name__ = "open"
    return open


async def on_a_thread(
    work: Callable[[], T], undo: Callable[[T], object] = lambda result: None, *, interruptible: bool = False
) -> T:
    """Return or raise what `work` does, on a daemon thread of its own, so that neither the event loop nor the end of
    the program waits for it.

    If the task is cancelled meanwhile, `undo` is called with the result, also on a thread. `interruptible` work ends
    instead, between two steps of Python; what it has done so far must not matter.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T) -> None:
        if future.done():
            _start(lambda: undo(result))
        else:
            future.set_result(result)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(fail, error)
            return
        try:
            loop.call_soon_threadsafe(settle, result)
        except RuntimeError:
            undo(result)

    call = _start(run)
    try:
        return await future
    except asyncio.CancelledError:
        if interruptible:
            call.interrupt()
        if future.done() and not future.cancelled() and future.exception() is None:
            result = future.result()
            _start(lambda: undo(result))
        raise


def _start(work: Callable[[], object]) -> InterruptibleCall[object]:
    return InterruptibleCall(work, "cortexmlx-async")
