"""Reply, AsyncReply: a streamed answer. Its conversation gets the turn when the answer is complete."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from cortexmlx.core.blocking_calls import run_on_thread
from cortexmlx.core.callbacks import report_progress
from cortexmlx.core.streams import AsyncTokenStream, Listener, StreamInUse, TokenStream
from cortexmlx.errors import InvalidRequest
from cortexmlx.sessions.turn import Turn
from cortexmlx.types.progress import OnProgress, Progress
from cortexmlx.types.request import Completion, TokenEvent

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle

Done = Callable[[Completion], None]
"""Called with the completion, before its event is returned."""


class StartedTurn(NamedTuple):
    """A turn whose request was submitted. `on_done` adds it to the conversation when it has ended."""

    handle: RequestHandle
    turn: Turn
    on_done: Done


class _PendingTurn:
    """A reply's turn, which may still begin on another thread. It does not keep the reply alive."""

    def __init__(self, started_turn: StartedTurn | None = None) -> None:
        self.started_turn = started_turn
        self.is_cancelled = False

    async def begin(
        self, prepare_turn: Callable[[], Callable[[Listener], StartedTurn]], listener: Listener
    ) -> RequestHandle:
        """Prepare and start the turn on threads, so that the event loop does not wait, and return its handle."""
        start_turn = await run_on_thread(prepare_turn, interruptible=True)
        self.started_turn = await run_on_thread(lambda: start_turn(listener), lambda late: late.handle.cancel())
        if self.is_cancelled:
            self.started_turn.handle.cancel()
        return self.started_turn.handle


class _ReplyBase:
    """What `Reply` and `AsyncReply` share: the turn, and the text that was read so far."""

    def __init__(self, pending_turn: _PendingTurn) -> None:
        self._pending_turn = pending_turn
        self._text_parts: list[tuple[str, str]] = []
        self.ended = False

    @property
    def _turn(self) -> Turn | None:
        """The turn that this reply answers; None if it has not begun."""
        return self._pending_turn.started_turn.turn if self._pending_turn.started_turn is not None else None

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
        return "".join(text for text, _ in self._text_parts), "".join(thinking for _, thinking in self._text_parts)

    def _record(self, event: TokenEvent) -> TokenEvent:
        """Record an event that is about to be returned. With the completion, the conversation gets the turn."""
        if event.index == 0:
            self._text_parts.append((event.text, event.thinking))
        if event.completion is not None and not self.ended:
            self.ended = True
            assert self._pending_turn.started_turn is not None
            self._pending_turn.started_turn.on_done(event.completion)
        return event


class Reply(_ReplyBase, Iterator[TokenEvent]):
    """Iterates over the events of one answer. With the last one, which has the completion, the conversation gets the
    turn.

    `cancel` ends the answer early, and its text so far is kept, once the reply is read on or its `with` is left.
    Without `cancel`, the end of a `with` cancels the request and leaves the conversation unchanged, as `close`, an
    error and dropping the reply do.
    """

    def __init__(self, started_turn: StartedTurn) -> None:
        super().__init__(_PendingTurn(started_turn))
        self._handle = started_turn.handle
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
        """End the answer early. Read on, up to its completion, or leave the `with`. Safe from another thread."""
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
        """Read the rest, return the answer. `on_progress` gets a long prompt's progress. Raises the request's error."""
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
        if kind is None and self.cancelling and not self.ended:
            for _ in self:  # up to its completion, with which the text is kept
                pass
        self.close()


class AsyncReply(_ReplyBase, AsyncIterator[TokenEvent]):
    """`Reply` for asyncio, with `aclose`. The first `anext` begins the turn on a thread; before, `prompt` is empty."""

    def __init__(self, prepare_turn: Callable[[], Callable[[Listener], StartedTurn]]) -> None:
        super().__init__(_PendingTurn())
        self._events = AsyncTokenStream(partial(self._pending_turn.begin, prepare_turn))

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
        """End the answer early, also before its first word. Read on, up to its completion, or leave the `with`."""
        self._pending_turn.is_cancelled = True
        if self._pending_turn.started_turn is not None:
            self._pending_turn.started_turn.handle.cancel()

    async def result(self, on_progress: OnProgress | None = None) -> Completion:
        """Read the remaining events, and return the whole answer; see `Reply.result`. Raises the request's error."""
        async with self:
            async for event in self:
                report_progress(on_progress, event)
        if self._pending_turn.started_turn is None:
            raise InvalidRequest("the reply was closed, or failed, before its request began: ask again")
        handle = self._pending_turn.started_turn.handle
        return handle.result() if handle.ended else await run_on_thread(handle.result)  # closed while it runs

    async def aclose(self) -> None:
        """Cancel the request and keep nothing, unless it has ended. Safe to call again."""
        self.ended = True
        await self._events.aclose()

    async def __aenter__(self) -> AsyncReply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._pending_turn.is_cancelled and self._pending_turn.started_turn and not self.ended:
            async for _ in self:
                pass
        await self.aclose()
