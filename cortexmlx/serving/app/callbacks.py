"""Events told to functions of the app's own: `on_event`, on a few threads for all requests, and `on_progress`."""

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

from cortexmlx.progress import OnProgress
from cortexmlx.request import TokenEvent
from cortexmlx.serving.handle import RequestHandle
from cortexmlx.serving.worker import stop_all

log = logging.getLogger("cortexmlx")

MOST = 16
"""Threads that tell events at once, but for those whose call takes longer than `SLOW`."""

SLOW = 1.0
"""Seconds after which a call does not count any more, so that others are told whether it returns or not."""

PATIENCE = 0.1
"""Seconds that an event waits for those before it until one more thread helps."""

_AT_EXIT = 1.0
"""Seconds that the end of the program waits for those who have not been told of the end of their requests."""


@dataclass(eq=False)
class _Told:
    """A request whose events are told, by one thread at a time: `busy`. `due` events came meanwhile. After the last of
    all it is `over`.
    """

    handle: RequestHandle
    on_event: Callable[[TokenEvent], None]
    busy: bool = False
    due: int = 0
    over: bool = False

    def take_turn(self) -> None:
        """Tell the next event."""
        event = self.handle.take()
        if event is None:
            self.over = self.handle.ended  # somebody else has read the end
            return
        try:
            self.on_event(event)
            self.over = event.completion is not None or event.error is not None
        except BaseException:  # it would end the thread, and Python would print all but a SystemExit
            log.exception("on_event raised, so it is not told of the rest of request %d", self.handle.id)
            self.over = True


class Tellers:
    """Threads that call `on_event` for an engine's requests: each event of a request in its order, one at a time.

    One thread tells all requests, event by event as they come. If one has waited for `PATIENCE`, because functions
    before it take their time, another thread helps, so that `MOST` are at it. Beside those there are only the ones
    whose call has lasted for `SLOW`: nobody waits for a function that does not return. All end with the last request.
    """

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
        """A request for each event that it has; what the engine's thread puts there is there or not, whatever is thrown
        at it. None: look whether any request is left.
        """
        self._lock = threading.Lock()
        self._all_told = threading.Condition(self._lock)
        self._open = self._taken = 0
        self._threads = self._waiting = 0
        self._watching = False
        self._calls: dict[int, float] = {}

    def tell(self, handle: RequestHandle, on_event: Callable[[TokenEvent], None]) -> None:
        """Have `on_event` called with every event of a request from now on; the last has a completion or an error."""
        with self._lock:
            if not self._threads:
                self._help()
            if self._open and not self._watching:  # a request that is alone holds up nobody
                _start(self._watch)
                self._watching = True
            self._open += 1
            _every.add(self)
        handle.announce(partial(self._ready.put, _Told(handle, on_event)))

    def join(self, seconds: float) -> None:
        """Wait until all have been told of the end of their requests, but no longer than that."""
        with self._lock:
            self._all_told.wait_for(lambda: not self._open, seconds)

    def _help(self) -> None:
        _start(self._tell)
        self._threads += 1

    def _tell(self) -> None:
        while self._is_needed():
            told = self._ready.get()
            if self._begin(told) and told is not None:
                told.take_turn()
                self._end(told)

    def _is_needed(self) -> bool:
        """Whether this thread should take a turn, or wait for one, for which one thread is enough."""
        with self._lock:
            if self._open and not (self._waiting and self._ready.empty()):
                self._waiting += 1
                return True
            self._threads -= 1
            if self._waiting:
                self._ready.put(None)
            return False

    def _begin(self, told: _Told | None) -> bool:
        """Whether an event of a request may be told now."""
        with self._lock:
            self._waiting -= 1
            self._taken += 1
            if told is None or told.over:
                return False
            if told.busy:
                told.due += 1
                return False
            told.busy = True
            self._calls[threading.get_ident()] = time.perf_counter()
            return True

    def _end(self, told: _Told) -> None:
        """An event was told."""
        with self._lock:
            del self._calls[threading.get_ident()]
            told.busy = False
            if told.over:
                told.handle.announce(None)
                self._open -= 1
                if not self._open:
                    self._all_told.notify_all()
            elif told.due or told.handle.ended:
                told.due = max(0, told.due - 1)
                self._ready.put(told)

    def _watch(self) -> None:
        """Look now and then whether an event has waited for too long, while there are several requests."""
        with self._lock:
            late_at = 0
            while not self._all_told.wait_for(lambda: not self._open, PATIENCE):
                late, late_at = self._taken < late_at, self._taken + self._ready.qsize()
                now = time.perf_counter()
                if late and sum(now - began < SLOW for began in self._calls.values()) < MOST:
                    with suppress(RuntimeError):  # the system gives no more threads
                        self._help()
            self._watching = False


_every: weakref.WeakSet[Tellers] = weakref.WeakSet()


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="cortexmlx-events", daemon=True).start()


def tell_progress(on_progress: OnProgress | None, event: TokenEvent) -> None:
    """Tell `on_progress`, if somebody gave one, of an event that says how far a prompt is."""
    if on_progress is not None and event.progress is not None:
        on_progress(event.progress)


@atexit.register
def _tell_of_the_end() -> None:
    """A program that ends closes its engines; who waits for events is told before the interpreter is gone. Python calls
    the newest of these functions first, so the engines are stopped here.
    """
    stop_all()
    until = time.monotonic() + _AT_EXIT
    for tellers in list(_every):
        tellers.join(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_every.clear)  # its threads, and who held its locks, are not in the child
