"""RequestHandle: one submitted request as its caller sees it. Any thread may use it, and it never blocks the engine."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from numbers import Real
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.system.waits import wait_until
from cortexmlx.types.logprobs import PromptLogprobs
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import Completion, FinishReason, RequestId, RequestState, TokenEvent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cortexmlx.core.prompt_history import PromptTrace

log = logging.getLogger("cortexmlx")

_TELLINGS = 3
"""How often a listener is called with the end, if exceptions are thrown at the engine's thread meanwhile."""


class NotCopyable:
    """Base of objects that cannot be copied or pickled, since a copy would share a thread and its queues."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise TypeError for copying and pickling, and so for sending to another process."""
        raise TypeError(
            f"{type(self).__name__} objects cannot be copied, pickled or sent to another process: they belong to the "
            "process that made them. Make an Engine in the other one, from the model's name"
        )


class RequestHandle(NotCopyable):
    """A submitted request: iterate over its events, wait for its result, or cancel it.

    Events wait here until they are read. The request's tokens bound their number, since only the newest progress event
    is kept. `listener` is called with every event on the engine's thread, and must return at once. `owner` is kept
    alive until the request has ended.
    """

    def __init__(
        self,
        request: RequestId,
        cancel: Callable[[RequestId], None],
        listener: Callable[[TokenEvent], None] | None = None,
        owner: object = None,
        check_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a handle. `check_thread` raises on a thread that must not wait for the request."""
        self.id = request
        self.prompt_logprobs: PromptLogprobs | None = None
        """Those of the prompt, if they were asked for: from the first token of an answer on."""
        self.pooled: npt.NDArray[np.float32] | None = None
        """What of its prompt's states was asked for, if it has no answer: at its end."""
        self.progress: Progress | None = None
        """How far its prompt was when its newest piece began, from the first on; `cached` tokens of it were found."""
        self.trace: PromptTrace | None = None
        """What was known of its prompt; None: nothing is explained."""
        self._cancel = cancel
        self._check_thread = check_thread
        self._cancelling = False
        self._listener = listener
        self._listener_raised = False
        self._tellings = _TELLINGS
        self._owner = owner
        # `with` takes a plain lock and enters in one go, whatever exception is thrown at the thread; a condition's not.
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._waiter_count = 0
        self._events: deque[TokenEvent] = deque()
        self._state = RequestState.WAITING
        self._completion: Completion | None = None
        self._error: CortexError | None = None
        self._end: TokenEvent | None = None
        self._event_callback: Callable[[], None] | None = None
        self._end_taken = False

    def __repr__(self) -> str:
        return f"<RequestHandle {self.id}: {self._state.value}>"

    @property
    def state(self) -> RequestState:
        """The stage that the request is in."""
        return self._state

    @property
    def ended(self) -> bool:
        """Whether it has finished, failed or been cancelled."""
        return self._state.final

    @property
    def cancelling(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelling

    def cancel(self) -> None:
        """Stop the request at the next step. Its result is the text so far, with finish_reason "cancelled"."""
        if not (self.ended or self._cancelling):
            self._cancelling = True
            self._cancel(self.id)

    def check_may_wait(self) -> None:
        """Raise CortexError on the engine's thread if the request has not ended: waiting would last for ever."""
        if not self.ended:
            self._check_thread()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer. Raises the request's CortexError, or TimeoutError after `timeout` seconds."""
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout):
            raise InvalidRequest(f"timeout is {timeout!r:.80}, but must be a number of seconds or None")
        self.check_may_wait()
        timeout = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        with self._lock:
            if not self._wait_until(lambda: self.ended, timeout):
                raise TimeoutError(f"request {self.id} is still {self._state.value} after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    def __iter__(self) -> Iterator[TokenEvent]:
        """Yield the events as they come; the last one has the completion. Raises the request's error at its end."""
        while (event := self.wait()) is not None:
            yield event

    def wait(self) -> TokenEvent | None:
        """Wait for the next event and return it; None after the last one. Raises the request's error at its end."""
        if not self._events:
            self.check_may_wait()
        with self._lock:
            self._wait_until(lambda: bool(self._events) or self.ended)
            if self._events:
                return self._events.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _wait_until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait, holding the lock, until `condition` holds. Return whether it does.

        It counts the waiting threads, because notifying nobody would take the engine's thread as long as all other work
        for an event.
        """
        self._waiter_count += 1
        try:
            return wait_until(self._condition, condition, timeout)
        finally:
            self._waiter_count -= 1

    def set_event_callback(self, callback: Callable[[], None] | None) -> None:
        """Have `callback` called for each event, queued ones included, and for the error; None ends the calls. They may
        come on any thread, and once too often: then `take` returns None.
        """
        with self._lock:
            self._event_callback = callback
            pending_count = len(self._events) + self.ended
        if callback is not None:
            for _ in range(pending_count):
                callback()

    def take(self) -> TokenEvent | None:
        """Return the next event or None, without waiting. The last event comes even if `wait` has returned it."""
        with self._lock:
            event = self._events.popleft() if self._events else None if self._end_taken else self._end
            self._end_taken = self._end_taken or (event is not None and event is self._end)
            return event

    # -- the engine's side --------------------------------------------------------------------------------------------

    def advance(self, state: RequestState) -> None:
        """Move the request to a state that is not final."""
        self._state = state

    def push(self, event: TokenEvent) -> None:
        """Add an event for readers and the listener. One that carries a completion ends the request."""
        with self._lock:
            if self._end is not None:  # by its listener, and the engine has not heard yet
                return
            if event.progress is not None and self._events and self._events[-1].progress is not None:
                self._events.pop()
            self._events.append(event)
            if event.completion is not None:
                is_cancelled = event.completion.finish_reason is FinishReason.CANCELLED
                self._completion, self._end = event.completion, event
                self.prompt_logprobs = event.completion.prompt_logprobs
                self._state = RequestState.CANCELLED if is_cancelled else RequestState.FINISHED
            if self._waiter_count:
                self._condition.notify_all()
            callback = self._event_callback
        if callback is not None:
            callback()
        self._call_listener(event)

    def fail(self, error: CortexError) -> None:
        """End the request with an error. If it has ended already, notify only those that have not been notified yet."""
        with self._lock:
            self._set_failed(error)
            self._condition.notify_all()
            end, callback = self._end, self._event_callback
        assert end is not None
        if callback is not None:
            callback()
        self._call_listener(end)

    def abandon(self, error: CortexError) -> None:
        """Fail the request in a forked child, where no other thread holds the lock or waits. Call no listener."""
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._listener = self._event_callback = None
        self._set_failed(error)

    def _set_failed(self, error: CortexError) -> None:
        """Set the error, the last event and the state of a failed request, unless it has ended."""
        if not self.ended:
            self._error = error
            self._end = TokenEvent.failed(error)
            self._state = RequestState.FAILED

    def _call_listener(self, event: TokenEvent) -> None:
        """Call the listener with an event. If it raises an Exception, it is only called with the last event from then
        on.

        Another BaseException, such as an interrupt, ends the request, since nobody knows what the listener has got. The
        end is still reported.
        """
        if event is not self._end:
            if self._listener is not None and not self._listener_raised:
                try:
                    self._listener(event)
                except Exception:
                    self._listener_raised = True
                    log.exception("the listener of request %d raised, so it is told only of the end", self.id)
                except BaseException as error:
                    self._listener_raised = True
                    log.exception("the listener of request %d raised, and the request ends with it", self.id)
                    self.fail(CortexError(f"the listener of the request was interrupted by {error!r}: ask again"))
                    self._cancel(self.id)
            return
        while self._listener is not None and self._tellings:
            self._tellings -= 1
            try:
                self._listener(event)
                break
            except BaseException:
                if not self._listener_raised:
                    log.exception("the listener of request %d raised when it was told of the end", self.id)
                self._listener_raised = True
        self._listener = self._owner = None
