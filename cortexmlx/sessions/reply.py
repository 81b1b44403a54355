"""An answer of a conversation while it is written: events as they come, and the turn is kept when it is whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from cortexmlx.progress import OnProgress, Progress
from cortexmlx.request import Completion, TokenEvent
from cortexmlx.serving.streams import AsyncTokenStream, Listener, TokenStream

if TYPE_CHECKING:
    from cortexmlx.serving.handle import RequestHandle

Done = Callable[[Completion], None]
"""Told of the completion, before its event is handed out."""


def _tell(on_progress: OnProgress | None, event: TokenEvent) -> None:
    if on_progress is not None and event.progress is not None:
        on_progress(event.progress)


class _Answer:
    """What a reply knows in either way of reading it."""

    def __init__(self, prompt: Sequence[int], thinking: str, done: Done) -> None:
        self.prompt = prompt
        self.thinking = thinking
        self.ended = False
        self._done = done

    def _taken(self, event: TokenEvent) -> TokenEvent:
        """An event that is handed out now: with the completion, the turn is the conversation's."""
        if event.completion is not None and not self.ended:
            self.ended = True
            self._done(event.completion)
        return event


class Reply(_Answer, Iterator[TokenEvent]):
    """The events of one answer; the last has the completion, and with it the conversation has the turn.

    `cancel` ends the answer where it is, and what there is of it is kept. `close`, the end of a `with`, an error and
    dropping it cancel the request and leave the conversation as it was. `prompt` are the tokens that the model reads;
    `thinking` is the tag that the chat template opened for its thoughts, if it did.
    """

    def __init__(self, handle: RequestHandle, prompt: Sequence[int], thinking: str, done: Done) -> None:
        super().__init__(prompt, thinking, done)
        self._handle = handle
        self._events = TokenStream(handle)

    def __next__(self) -> TokenEvent:
        """The next event. Raises the request's error."""
        try:
            event = next(self._events)
        except BaseException:
            self.ended = True
            raise
        return self._taken(event)

    def cancel(self) -> None:
        """End the answer where it is; go on reading to its completion. Safe from another thread."""
        self._handle.cancel()

    @property
    def progress(self) -> Progress | None:
        """See `RequestHandle.progress`."""
        return self._handle.progress

    @property
    def cancelling(self) -> bool:
        """It was asked to end."""
        return self._handle.cancelling

    def result(self, on_progress: OnProgress | None = None) -> Completion:
        """The whole answer, once the events that are left have been read; `on_progress` is told of those that tell how
        far a long prompt is. Raises the request's error.
        """
        with self:
            for event in self:
                _tell(on_progress, event)
            return self._handle.result()

    def close(self) -> None:
        """Cancel the request and keep nothing, unless it has ended. Safe to call again."""
        self.ended = True
        self._events.close()

    def __enter__(self) -> Reply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncReply(_Answer, AsyncIterator[TokenEvent]):
    """`Reply` for asyncio, submitted with the first `anext`; `aclose` in the place of `close`."""

    def __init__(
        self, submit: Callable[[Listener], RequestHandle], prompt: Sequence[int], thinking: str, done: Done
    ) -> None:
        super().__init__(prompt, thinking, done)
        self._handle: RequestHandle | None = None
        self._submit = submit
        self._events = AsyncTokenStream(self._begin)

    async def _begin(self, listener: Listener) -> RequestHandle:
        self._handle = self._submit(listener)
        return self._handle

    def __aiter__(self) -> AsyncReply:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises the request's error."""
        try:
            event = await anext(self._events)
        except BaseException:
            self.ended = True
            raise
        return self._taken(event)

    def cancel(self) -> None:
        """End the answer where it is; go on reading to its completion."""
        if self._handle is not None:
            self._handle.cancel()

    async def result(self, on_progress: OnProgress | None = None) -> Completion:
        """The whole answer, once the events that are left have been read; `on_progress` as for `Reply.result`. Raises
        the request's error.
        """
        async with self:
            async for event in self:
                _tell(on_progress, event)
        assert self._handle is not None  # the request was submitted with the first event
        return self._handle.result()

    async def aclose(self) -> None:
        """Cancel the request and keep nothing, unless it has ended. Safe to call again."""
        self.ended = True
        await self._events.aclose()

    async def __aenter__(self) -> AsyncReply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
