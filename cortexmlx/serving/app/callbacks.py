"""Call an app's `on_event` and `on_progress`: a few threads serve all requests."""

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
    """A request whose events are told; `due` of them came while one was. After the last of all it is `over`."""

    handle: RequestHandle
    on_event: Callable[[TokenEvent], None]
    due: int = 0
    over: bool = False

    def take_turn(self) -> None:
        """Tell the next event, if there is one."""
        try:
            event = self.handle.take()
            if event is not None:
                self.on_event(event)
                self.over = event.completion is not None or event.error is not None
        except BaseException:  # it would end the thread, and Python would print all but a SystemExit
            self.over = True
            log.exception("on_event raised, so it is not told of the rest of request %d", self.handle.id)


class Tellers:
    """Threads that call `on_event` for an engine's requests: each event of a request in its order, one at a time.

    One thread tells all requests, event by event as they come. If one has waited for `PATIENCE`, because functions
    before it take their time, another thread helps, so that `MOST` are at it. Beside those there are only the ones
    whose call has lasted for `SLOW`: nobody waits for a function that does not return. All end with the last request.
    """

    def __init__(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """There are no requests and no threads: also in a forked child, where another may have had the lock."""
        self._ready: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
        """A request for each event that it has, to be looked at: one too many does no harm. What the engine's thread
        puts there is there or not, whatever is thrown at it. None: look whether any request is left.
        """
        self._lock = threading.Lock()
        self._all_told = threading.Condition(self._lock)
        self._open: set[_Told] = set()
        self._threads: set[threading.Thread] = set()
        self._calls: dict[_Told, tuple[threading.Thread, float]] = {}
        """The requests of which an event is told now, by whom, and since when. Every other thread waits for one."""
        self._taken = 0
        self._watching = False

    def tell(self, handle: RequestHandle, on_event: Callable[[TokenEvent], None]) -> None:
        """Have `on_event` called with every event of a request from now on; the last has a completion or an error."""
        told = _Told(handle, on_event)
        try:
            with self._lock:
                if not self._threads:
                    self._help()
                if self._open and not self._watching:  # a request that is alone holds up nobody
                    _thread(self._watch).start()
                    self._watching = True
                self._open.add(told)
                _every.add(self)
            handle.announce(partial(self._ready.put, told))
        except BaseException:  # no thread is to be had, or Ctrl-C
            with self._lock:
                self._close(told)
            self._ready.put(None)
            raise

    def join(self, seconds: float) -> None:
        """Wait until all have been told of the end of their requests, but no longer than that."""
        with self._lock:
            self._all_told.wait_for(lambda: not self._open, seconds)

    def _help(self) -> None:
        thread = _thread(self._tell)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # one that was interrupted may have begun: that adds itself
            self._threads.discard(thread)
            raise

    def _tell(self) -> None:
        me, needed, whole = threading.current_thread(), True, True
        while needed:
            try:
                if not whole:
                    self._recover(me)
                    whole = True
                while needed := self._is_needed(me):
                    told = self._ready.get()
                    if told is not None and self._begin(told, me):
                        told.take_turn()
                        self._end(told)
                    del told  # nobody else may need it while this thread waits
            except BaseException:  # thrown at this thread, or by who logs
                whole = False

    def _is_needed(self, me: threading.Thread) -> bool:
        """Whether this thread should take a turn, or wait for one, for which one thread is enough."""
        with self._lock:
            self._threads.add(me)
            another_waits = len(self._threads) - 1 > len(self._calls)
            if self._open and not (another_waits and self._ready.empty()):
                return True
            self._threads.discard(me)
            if another_waits:
                self._ready.put(None)
            return False

    def _begin(self, told: _Told, me: threading.Thread) -> bool:
        """Whether an event of a request may be told now."""
        with self._lock:
            self._taken += 1
            if told in self._calls:
                told.due += 1
            elif told in self._open:
                self._calls[told] = me, time.perf_counter()
                return True
            return False

    def _end(self, told: _Told) -> None:
        """An event was told."""
        with self._lock:
            if told.over:
                self._close(told)
            elif told.due or told.handle.ended:
                told.due = max(0, told.due - 1)
                self._ready.put(told)
            self._calls.pop(told, None)

    def _close(self, told: _Told) -> None:
        """Tell no more of a request. With the lock."""
        told.handle.announce(None)
        self._open.discard(told)
        if not self._open:
            with suppress(queue.Empty):  # what is left would keep a request, and what its function knows
                while True:
                    self._ready.get_nowait()
            self._all_told.notify_all()

    def _recover(self, me: threading.Thread) -> None:
        """Go on after an exception that landed anywhere, at an item that this thread had just taken, too: look at all
        requests.
        """
        with self._lock:
            mine = [told for told, (thread, _) in self._calls.items() if thread is me]
        for told in mine:
            self._end(told)
        with self._lock:
            for told in self._open:
                self._ready.put(told)

    def _watch(self) -> None:
        """Look now and then whether an event has waited for too long, while there are several requests."""
        with self._lock:
            late_at = 0
            try:
                while not self._all_told.wait_for(lambda: not self._open, PATIENCE):
                    late, late_at = self._taken < late_at, self._taken + self._ready.qsize()
                    slow_from = time.perf_counter() - SLOW
                    slow = sum(began <= slow_from for _, began in self._calls.values())
                    if late and len(self._threads) - slow < MOST:
                        with suppress(RuntimeError):  # the system gives no more threads
                            self._help()
            finally:
                self._watching = False


_every: weakref.WeakSet[Tellers] = weakref.WeakSet()


def _thread(work: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=work, name="cortexmlx-events", daemon=True)


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


def _in_child() -> None:
    for tellers in list(_every):
        tellers.abandon()


os.register_at_fork(after_in_child=_in_child)
