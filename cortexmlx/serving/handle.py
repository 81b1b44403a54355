"""RequestHandle: one submitted request as its caller sees it. Safe from any thread; it never blocks the engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from cortexmlx.errors import CortexError
from cortexmlx.request import Completion, RequestState, TokenEvent


class RequestHandle:
    """A request in flight: iterate over its events, wait for its result, or cancel it.

    Events wait here until they are read; their number is bounded by the request's tokens. `listener`, if given, is
    told of every event on the engine's thread and must return at once.
    """

    def __init__(
        self, request: int, cancel: Callable[[int], None], listener: Callable[[TokenEvent | None], None] | None = None
    ) -> None:
        self.id = request
        self._cancel = cancel
        self._listener = listener
        self._changed = threading.Condition()
        self._events: deque[TokenEvent] = deque()
        self._state = RequestState.WAITING
        self._completion: Completion | None = None
        self._error: CortexError | None = None

    @property
    def state(self) -> RequestState:
        """Where the request is in its life."""
        return self._state

    def cancel(self) -> None:
        """Stop the request at the next step. Its result is the text so far, with finish_reason "cancelled"."""
        self._cancel(self.id)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer. Raises the request's CortexError if it failed, TimeoutError after `timeout`
        seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._state.final, timeout):
                raise TimeoutError(f"request {self.id} is still {self._state.value} after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    def __iter__(self) -> Iterator[TokenEvent]:
        """The request's events as they come; the last one carries the completion. Raises the request's error at its
        end.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._state.final)
                event = self._events.popleft() if self._events else None
            if event is not None:
                yield event
            elif self._error is not None:
                raise self._error
            else:
                return

    # -- the engine's side --------------------------------------------------------------------------------------------

    def advance(self, state: RequestState) -> None:
        """The request moved on to a state that is not final."""
        self._state = state

    def push(self, event: TokenEvent) -> None:
        """One more event; the one that carries a completion ends the request."""
        with self._changed:
            self._events.append(event)
            if event.completion is not None:
                cancelled = event.completion.finish_reason.value == "cancelled"
                self._completion = event.completion
                self._state = RequestState.CANCELLED if cancelled else RequestState.FINISHED
            self._changed.notify_all()
        if self._listener is not None:
            self._listener(event)

    def fail(self, error: CortexError) -> None:
        """The request ends with an error. Nothing happens if it has ended already."""
        with self._changed:
            if self._state.final:
                return
            self._error = error
            self._state = RequestState.FAILED
            self._changed.notify_all()
        if self._listener is not None:
            self._listener(None)
