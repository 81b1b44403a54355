"""Shared: one result for all who ask at the same time, so that many viewers cost an engine no more than one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from cortexmlx.core.event_loop import on_a_thread

T = TypeVar("T")

EVERY = 0.25
"""Seconds between two calls, at least."""


class Shared(Generic[T]):
    """The newest result of `make`, which runs on a thread: one call at a time, and at most one every `every` seconds.
    Who asks in between gets the result of the call before, also if that is an error.
    """

    def __init__(self, make: Callable[[], T], every: float = EVERY) -> None:
        self._make = make
        self._every = every
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._next = 0.0

    async def take(self) -> T:
        """Return the newest result, or raise its error. A cancelled caller does not end the call of the others."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._loop is not loop or (self._task.done() and time.monotonic() >= self._next):
            self._loop, self._task = loop, loop.create_task(self._call())
            self._task.add_done_callback(_heard)
        return await asyncio.shield(self._task)

    async def _call(self) -> T:
        try:
            return await on_a_thread(self._make)
        finally:
            self._next = time.monotonic() + self._every


def _heard(task: asyncio.Task[T]) -> None:
    """Take note of the error of a call whose callers have all gone, or asyncio would log it."""
    if not task.cancelled():
        task.exception()
