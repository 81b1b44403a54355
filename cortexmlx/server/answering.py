"""A request's answers: asked of the engine, read as events, and cancelled when nobody reads them any more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cortexmlx.core.event_loop import on_a_thread
from cortexmlx.errors import CortexError
from cortexmlx.protocols.request import Request, is_tokens
from cortexmlx.server.transcripts import Reading, Table
from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, TokenEvent

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.engine import Engine


MOST_WAITING = 4096
"""Events of one request that may wait for a slow reader. With one more, the request is cancelled."""


class SlowReader(CortexError):
    """A client reads its stream so slowly that too much of it is waiting."""


class Answering:
    """The answers to the prompts of one request."""

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        request: Request,
        transcripts: Table | None = None,
        adapter: str | None = None,
    ) -> None:
        self._engine = engine
        self._adapter = adapter
        self._transcripts = transcripts
        self._mailbox = mailbox
        self._request = request
        self._handles: list[RequestHandle] = []
        self._events: deque[tuple[int, TokenEvent]] = deque()
        self._news = asyncio.Event()
        self.closed = False
        """Whether nobody reads what comes."""
        self.completions: dict[int, Completion] = {}
        """The completions so far, by the numbers of their prompts."""
        self.failed = 0
        """How many prompts ended with an error."""

    async def begin(self, client: str | None, timeout: float | None) -> None:
        """Submit all prompts. They are tokenized on a thread. Raises what `Engine.submit` raises."""
        await on_a_thread(lambda: self._submit(client, timeout), lambda done: self.close())

    def _submit(self, client: str | None, timeout: float | None) -> None:
        for number, asked in enumerate(self._request.prompts):
            prompt: Any = asked
            reading = None
            if not isinstance(asked, str) and not is_tokens(asked):
                if self._transcripts is not None:
                    reading = Reading(self._transcripts, client or "", prompt, self._request.params)
                    prompt = reading.messages
                prompt = ChatPrompt(prompt, self._request.template_vars, self._request.hints, reading)
            listener = self._listener(number, reading)
            self._handles.append(
                self._engine.submit(
                    prompt,
                    self._request.params,
                    listener=listener,
                    client=client,
                    timeout=timeout,
                    adapter=self._adapter,
                )
            )

    def _listener(self, number: int, reading: Reading | None) -> Any:
        def deliver(event: TokenEvent) -> None:
            if event.completion is not None and reading is not None:
                reading.ended(event.completion)
            if self.closed:
                return
            self._events.append((number, event))
            self._news.set()
            if len(self._events) > MOST_WAITING:
                why = f"more than {MOST_WAITING} events wait to be read: the request is cancelled"
                self._events.append((number, TokenEvent("", error=SlowReader(why))))
                self.close()

        return lambda event: self._mailbox.put(deliver, event)

    async def events(self, quiet: float) -> AsyncIterator[tuple[int, TokenEvent] | None]:
        """Yield each event with the number of its prompt, up to the last completion or the first error, which may be
        a SlowReader. Yield None whenever nothing has come for `quiet` seconds. After `close` it ends.
        """
        while len(self.completions) < len(self._request.prompts):
            if not self._events:
                if self.closed:
                    return
                self._news.clear()
                alarm = asyncio.get_running_loop().call_later(quiet, self._news.set)  # without a task for each event
                try:
                    await self._news.wait()
                finally:
                    alarm.cancel()
                if not self._events and not self.closed:
                    yield None
                continue
            number, event = self._events.popleft()
            if event.completion is not None:
                self.completions[number] = event.completion
            self.failed += event.error is not None
            yield number, event
            if event.error is not None:
                return

    @property
    def cancelled(self) -> int:
        """How many prompts have no answer: nobody waited for it, or another prompt's error ended the request."""
        return len(self._handles) - len(self.completions) - self.failed

    def progress(self) -> Progress | None:
        """Return how far the first prompt is; None if it has not begun."""
        return self._handles[0].progress if self._handles else None

    async def result(self) -> list[tuple[Completion, ...]]:
        """Return all answers to each prompt. Raises the error of the first prompt that fails."""
        async for item in self.events(3600.0):
            if item is not None and item[1].error is not None:
                raise item[1].error
        return [(done, *done.others) for _, done in sorted(self.completions.items())]

    def close(self) -> None:
        """Cancel what has not ended. Safe to call again, and from other threads."""
        self.closed = True
        for handle in self._handles:
            handle.cancel()


# Mailbox: events of the engine's thread for many streams of an event loop, with one wake-up for all that come together.


Deliver = Callable[[TokenEvent], None]


class Mailbox:
    """Hands events from the engine's thread to an event loop. The engine never waits for the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Deliver, TokenEvent]] = deque()
        self._woken = False
        self.wakeups = 0
        """How often the loop was woken."""

    def put(self, deliver: Deliver, event: TokenEvent) -> None:
        """Have the loop call `deliver(event)`. Called on the engine's thread."""
        self._waiting.append((deliver, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # before the first event is taken: what is put after that wakes the loop again
        self.wakeups += 1
        while self._waiting:
            deliver, event = self._waiting.popleft()
            deliver(event)
