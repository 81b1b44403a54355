"""TokenStream, AsyncTokenStream: answers as iterators. If the reader stops early, the request is cancelled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TypeAlias

from cortexmlx.core.handle import NotCopyable, RequestHandle
from cortexmlx.core.threads import forked_process_error
from cortexmlx.errors import InvalidRequest
from cortexmlx.types.request import Completion, TokenEvent

Listener: TypeAlias = Callable[[TokenEvent], None]


class TokenStream(NotCopyable, Iterator[TokenEvent]):
    """Iterates over the events of a request. `close`, the end of a `with`, an error in `next` and dropping the stream
    cancel the request.

    A generator would not do this: closing a generator that was never started runs nothing.
    """

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._closed = False

    def __repr__(self) -> str:
        return f"<TokenStream of {self._handle!r}>"

    def __next__(self) -> TokenEvent:
        """Return the next event. Raises the request's error."""
        if self._closed:
            raise StopIteration
        try:
            event = self._handle.wait()
            if event is None:
                raise StopIteration
            return event
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the request, if it has not ended. Safe to call again, and from another thread."""
        if not self._closed:
            self._closed = True
            self._handle.cancel()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class StreamInUse(InvalidRequest):
    """Raised when two tasks read the same stream at once. The stream continues."""


class AsyncTokenStream(NotCopyable, AsyncIterator[TokenEvent]):
    """Iterates over the events of a request in asyncio. The first `anext` submits the request, and the stream belongs
    to its event loop. `aclose`, the end of an `async with`, an error or a cancelled task in `anext`, and dropping
    the stream cancel the request, whether the loop still runs or not.
    """

    def __init__(self, submit: Callable[[Listener], Awaitable[RequestHandle]]) -> None:
        self._submit = submit
        self._handle: RequestHandle | None = None
        self._is_reading = self._closed = False
        self._process = os.getpid()

    def __aiter__(self) -> AsyncTokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        """Return the next event. Raises the request's error, and at the first event what `submit` raises. Raises
        InvalidRequest while another task waits for an event; the stream continues.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._is_reading:
            raise StreamInUse("another task waits for the next event of this stream: one task reads it")
        self._is_reading = True
        try:
            if self._handle is None:
                await self._submit_request()
            event = await self._next_event()
        except BaseException:
            self._close()
            raise
        finally:
            self._is_reading = False
        if event.error is not None:
            self._close()
            raise event.error
        if event.completion is not None:
            self._close()
        return event

    async def aclose(self) -> None:
        """Cancel the request, if it has not ended. Safe to call again."""
        self._close()

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    async def _submit_request(self) -> None:
        """Submit the request, and queue its events in this event loop."""
        loop = self._loop = asyncio.get_running_loop()
        event_queue = self._event_queue = asyncio.Queue[TokenEvent]()

        def listen(event: TokenEvent) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(event_queue.put_nowait, event)

        self._handle = await self._submit(listen)
        if self._closed:
            self._handle.cancel()
        self._handle.check_may_wait()

    async def _next_event(self) -> TokenEvent:
        """Wait for the next event. Raises InvalidRequest in another event loop, and ForkedProcess in a forked child."""
        if os.getpid() != self._process:
            raise forked_process_error()
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidRequest("the stream began in another event loop: read all of it in one")
        return await self._event_queue.get()

    def _close(self) -> None:
        """Cancel the request if it was submitted, and end the stream."""
        if not self._closed and self._handle is not None:
            self._handle.cancel()
        self._closed = True


async def wait_for_completion(submit: Callable[[Listener], Awaitable[RequestHandle]]) -> Completion:
    """Submit a request and await its completion. Raises its error. Cancelling the task cancels the request."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[TokenEvent] = loop.create_future()

    def set_end(event: TokenEvent) -> None:
        if not end.done():
            end.set_result(event)

    def listen(event: TokenEvent) -> None:
        if event.completion is not None or event.error is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(set_end, event)

    handle = await submit(listen)
    try:
        handle.check_may_wait()
        last = await end
    except BaseException:
        handle.cancel()
        raise
    if last.error is not None:
        raise last.error
    assert last.completion is not None
    return last.completion
