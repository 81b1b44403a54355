"""CallbackThreads: a few threads that call the `on_event` functions of all requests of an engine."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.worker import stop_all
from cortexmlx.types.progress import OnProgress
from cortexmlx.types.request import TokenEvent

log = logging.getLogger("cortexmlx")

MAX_THREADS = 16
"""Bound of the threads that call functions. A thread in a slow call is not counted."""

SLOW_SECONDS = 1.0
"""A call is slow after this time: another thread may take its place, so that a function that never returns stops
nobody else.
"""

WAIT_SECONDS = 0.1
"""An event waits this long in the queue before one more thread starts."""

_AT_EXIT = 1.0
"""Seconds that the end of the program waits for the last events to be delivered."""


@dataclass(eq=False)
class _Subscription:
    """A request, and the app's function that gets its events."""

    handle: RequestHandle
    on_event: Callable[[TokenEvent], None]

    pending_events: int = 0
    """Events that came during the call for an earlier one."""

    is_over: bool = False
    """The function got the last event, or it raised."""

    def deliver_next(self) -> None:
        """Call the function with the next event, if there is one."""
        try:
            event = self.handle.take()
            if event is not None:
                self.on_event(event)
                self.is_over = event.completion is not None or event.error is not None
        except BaseException:  # it would end the thread, and Python would print all but a SystemExit
            self.is_over = True
            log.exception("on_event raised: it gets no more events of request %d", self.handle.id)


class CallbackThreads:
    """Threads that call `on_event` for an engine's requests. Each function gets the events of its request in order, one
    at a time.

    One thread serves all requests. When an event has waited for `WAIT_SECONDS`, one more thread starts. At most
    `MAX_THREADS` threads run, not counting those in a call of more than `SLOW_SECONDS`. All threads end with the last
    request.
    """

    def __init__(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Forget all requests, threads and locks in a forked child: the threads are gone, perhaps with a lock held."""
        self._ready_queue: queue.SimpleQueue[_Subscription | None] = queue.SimpleQueue()
        """A request for each of its events; one too many does no harm. None wakes a thread so that it checks whether it
        is still needed. `put` is atomic, so an exception thrown at the engine's thread cannot break the queue.
        """
        self._lock = threading.Lock()
        self._all_over = threading.Condition(self._lock)
        self._open: set[_Subscription] = set()
        self._threads: set[threading.Thread] = set()
        self._calls: dict[_Subscription, tuple[threading.Thread, float]] = {}
        """The requests whose function runs now, in which thread, and since when. All other threads wait."""
        self._taken_count = 0
        self._is_watching = False

    def subscribe(self, handle: RequestHandle, on_event: Callable[[TokenEvent], None]) -> None:
        """Call `on_event` with every event of a request. The last one has a completion or an error. If no
        thread can be started, cancel the request, because the caller gets no handle.
        """
        subscription = _Subscription(handle, on_event)
        try:
            with self._lock:
                if not self._threads:
                    self._start_thread()
                if self._open and not self._is_watching:  # a request that is alone holds up nobody
                    _make_thread(self._add_threads_when_late).start()
                    self._is_watching = True
                self._open.add(subscription)
                _all_callback_threads.add(self)
            handle.set_event_callback(partial(self._ready_queue.put, subscription))
        except BaseException:  # no thread is to be had, or Ctrl-C
            with self._lock:
                self._end_subscription(subscription)
            self._ready_queue.put(None)
            handle.cancel()
            raise

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` until every function has got its last event."""
        with self._lock:
            self._all_over.wait_for(lambda: not self._open, seconds)

    def _start_thread(self) -> None:
        """Start one more thread that calls functions."""
        thread = _make_thread(self._serve)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # one that was interrupted may have begun: that adds itself
            self._threads.discard(thread)
            raise

    def _serve(self) -> None:
        """Call functions with their events, until this thread is not needed any more. Each thread runs this."""
        me, is_needed, is_intact = threading.current_thread(), True, True
        while is_needed:
            try:
                if not is_intact:
                    self._recover(me)
                    is_intact = True
                while is_needed := self._is_needed(me):
                    subscription = self._ready_queue.get()
                    if subscription is not None and self._begin_call(subscription, me):
                        subscription.deliver_next()
                        self._end_call(subscription)
                    del subscription  # a thread that waits keeps no request alive
            except BaseException:  # thrown at this thread, or by who logs
                is_intact = False

    def _is_needed(self, me: threading.Thread) -> bool:
        """Return whether this thread should continue. One waiting thread is enough."""
        with self._lock:
            self._threads.add(me)
            another_waits = len(self._threads) - 1 > len(self._calls)
            if self._open and not (another_waits and self._ready_queue.empty()):
                return True
            self._threads.discard(me)
            if another_waits:
                self._ready_queue.put(None)
            return False

    def _begin_call(self, subscription: _Subscription, me: threading.Thread) -> bool:
        """Mark a request's function as running. Return False if it already runs, or if the request has ended."""
        with self._lock:
            self._taken_count += 1
            if subscription in self._calls:
                subscription.pending_events += 1
            elif subscription in self._open:
                self._calls[subscription] = me, time.perf_counter()
                return True
            return False

    def _end_call(self, subscription: _Subscription) -> None:
        """Mark the end of a call, and queue the request again if more events are due."""
        with self._lock:
            if subscription.is_over:
                self._end_subscription(subscription)
            elif subscription.pending_events or subscription.handle.ended:
                subscription.pending_events = max(0, subscription.pending_events - 1)
                self._ready_queue.put(subscription)
            self._calls.pop(subscription, None)

    def _end_subscription(self, subscription: _Subscription) -> None:
        """Deliver no more events of a request. The caller holds the lock."""
        subscription.handle.set_event_callback(None)
        self._open.discard(subscription)
        if not self._open:
            with suppress(queue.Empty):  # an item that stays here would keep its request and function alive
                while True:
                    self._ready_queue.get_nowait()
            self._all_over.notify_all()

    def _recover(self, me: threading.Thread) -> None:
        """Continue after an exception thrown at this thread. It may have lost a queue item: requeue all requests."""
        with self._lock:
            thread_subscriptions = [subscription for subscription, (thread, _) in self._calls.items() if thread is me]
        for subscription in thread_subscriptions:
            self._end_call(subscription)
        with self._lock:
            for subscription in self._open:
                self._ready_queue.put(subscription)

    def _add_threads_when_late(self) -> None:
        """Start one more thread whenever an event has waited too long, until no request is open."""
        with self._lock:
            late_at = 0
            try:
                while not self._all_over.wait_for(lambda: not self._open, WAIT_SECONDS):
                    is_late, late_at = self._taken_count < late_at, self._taken_count + self._ready_queue.qsize()
                    slow_from = time.perf_counter() - SLOW_SECONDS
                    slow = sum(start_time <= slow_from for _, start_time in self._calls.values())
                    if is_late and len(self._threads) - slow < MAX_THREADS:
                        with suppress(RuntimeError):  # the system gives no more threads
                            self._start_thread()
            finally:
                self._is_watching = False


_all_callback_threads: weakref.WeakSet[CallbackThreads] = weakref.WeakSet()


def _make_thread(work: Callable[[], None]) -> threading.Thread:
    """Return a daemon thread, not started yet, that runs `work`."""
    return threading.Thread(target=work, name="cortexmlx-events", daemon=True)


def report_progress(on_progress: OnProgress | None, event: TokenEvent) -> None:
    """Call `on_progress`, if there is one, with an event's progress, if the event has some."""
    if on_progress is not None and event.progress is not None:
        on_progress(event.progress)


@atexit.register
def _deliver_last_events() -> None:
    """Stop all engines and wait for the last events, before the interpreter is gone. Python calls the newest exit
    function first, so this one has to stop the engines itself.
    """
    stop_all()
    deadline = time.monotonic() + _AT_EXIT
    for threads in list(_all_callback_threads):
        threads.join(max(0.0, deadline - time.monotonic()))


def _abandon_after_fork() -> None:
    """Forget all subscriptions and threads in a forked child."""
    for threads in list(_all_callback_threads):
        threads.abandon()


os.register_at_fork(after_in_child=_abandon_after_fork)
