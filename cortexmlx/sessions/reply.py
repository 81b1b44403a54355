"""Reply, AsyncReply: a streamed answer of a conversation, which gets the turn when the answer is complete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from cortexmlx.core.callbacks import report_progress
from cortexmlx.core.event_loop import run_on_thread
from cortexmlx.core.streams import AsyncTokenStream, Listener, StreamInUse, TokenStream
from cortexmlx.sessions.turn import Turn
from cortexmlx.types.progress import OnProgress, Progress
from cortexmlx.types.request import Completion, TokenEvent

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle

Done = Callable[[Completion], None]
"""Called with the completion, before its event is returned."""


class StartedTurn(NamedTuple):
    """A turn whose request was submitted. `done` adds it to the conversation when it has ended."""

    handle: RequestHandle
    turn: Turn
    done: Done


class _PendingTurn:
    """The turn that a reply answers, which may still begin on another thread. It does not refer to the reply, which
    can therefore be dropped.
    """

    def __init__(self, begun: StartedTurn | None = None) -> None:
        self.begun = begun
        self.cancelled = False

    async def begin(self, begin: Callable[[Listener], StartedTurn], listener: Listener) -> RequestHandle:
        """Begin the turn on a thread, so that the event loop does not wait, and return its handle."""
        self.begun = await run_on_thread(lambda: begin(listener), lambda late: late.handle.cancel())
        if self.cancelled:
            self.begun.handle.cancel()
        return self.begun.handle


class _ReplyBase:
    """What `Reply` and `AsyncReply` share: the turn, and the text that was read so far."""

    def __init__(self, coming: _PendingTurn) -> None:
        self._coming = coming
        self._pieces: list[tuple[str, str]] = []
        self.ended = False

    @property
    def _turn(self) -> Turn | None:
        """The turn that this reply answers; None if it has not begun."""
        return self._coming.begun.turn if self._coming.begun is not None else None

    @property
    def prompt(self) -> Sequence[int]:
        """The tokens of the prompt; empty if the turn has not begun."""
        return () if self._turn is None else self._turn.prompt

    @property
    def opened(self) -> str:
        """The opening tag of thoughts that the chat template put into the prompt; empty if it put none."""
        return "" if self._turn is None else self._turn.opened

    @property
    def _read_so_far(self) -> tuple[str, str]:
        """The text and the thoughts that were read so far, of the first answer if there are several."""
        return "".join(text for text, _ in self._pieces), "".join(thinking for _, thinking in self._pieces)

    def _record(self, event: TokenEvent) -> TokenEvent:
        """Record an event that is about to be returned. With the completion, the conversation gets the turn."""
        if event.index == 0:
            self._pieces.append((event.text, event.thinking))
        if event.completion is not None and not self.ended:
            self.ended = True
            assert self._coming.begun is not None
            self._coming.begun.done(event.completion)
        return event


class Reply(_ReplyBase, Iterator[TokenEvent]):
    """Iterates over the events of one answer. With the last one, which has the completion, the conversation gets the
    turn.

    `cancel` ends the answer early, and its text so far is kept. `close`, the end of a `with`, an error and dropping the
    reply cancel the request, and leave the conversation unchanged.
    """

    def __init__(self, begun: StartedTurn) -> None:
        super().__init__(_PendingTurn(begun))
        self._handle = begun.handle
        self._events = TokenStream(self._handle)

    def __next__(self) -> TokenEvent:
        """Return the next event. Raises the request's error."""
        try:
            event = next(self._events)
        except BaseException:
            self.ended = True
            raise
        return self._record(event)

    def cancel(self) -> None:
        """End the answer early. Continue to read, up to its completion. Safe from another thread."""
        self._handle.cancel()

    @property
    def progress(self) -> Progress | None:
        """The progress of the prompt: see `RequestHandle.progress`."""
        return self._handle.progress

    @property
    def cancelling(self) -> bool:
        """Whether `cancel` was called."""
        return self._handle.cancelling

    def result(self, on_progress: OnProgress | None = None) -> Completion:
        """Read the remaining events, and return the whole answer. `on_progress` is called with the progress of a long
        prompt. Raises the request's error.
        """
        with self:
            for event in self:
                report_progress(on_progress, event)
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


class AsyncReply(_ReplyBase, AsyncIterator[TokenEvent]):
    """`Reply` for asyncio. The first `anext` begins the turn on another thread; until then `prompt` is empty. `aclose`
    replaces `close`.
    """

    def __init__(self, begin: Callable[[Listener], StartedTurn]) -> None:
        super().__init__(_PendingTurn())
        self._events = AsyncTokenStream(partial(self._coming.begin, begin))

    def __aiter__(self) -> AsyncReply:
        return self

    async def __anext__(self) -> TokenEvent:
        """Return the next event. Raises the request's error."""
        try:
            event = await anext(self._events)
        except StreamInUse:
            raise
        except BaseException:
            self.ended = True
            raise
        return self._record(event)

    def cancel(self) -> None:
        """End the answer early, also before its first word. Continue to read, up to its completion."""
        self._coming.cancelled = True
        if self._coming.begun is not None:
            self._coming.begun.handle.cancel()

    async def result(self, on_progress: OnProgress | None = None) -> Completion:
        """Read the remaining events, and return the whole answer; see `Reply.result`. Raises the request's error."""
        async with self:
            async for event in self:
                report_progress(on_progress, event)
        assert self._coming.begun is not None  # the request was submitted with the first event
        return self._coming.begun.handle.result()

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
