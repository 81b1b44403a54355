"""Threads that run one at a time, in an order that is drawn: whatever locks, queues and clocks allow can happen, and
happens again with the same seed. A module's `threading`, `queue` and `time` are replaced by this.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_FOR_EVER = 10_000.0
"""Seconds."""


class Thrown(BaseException):
    """Thrown at a thread from outside."""


class Interleaved:
    """The scheduler. Every operation of a lock, a queue or a condition is where another thread may go on. At its next
    one, each of the threads in `targets` has `Thrown` raised.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = 0.0
        self.targets: set[_Thread] = set()
        self.threads: list[_Thread] = []
        self._turn = threading.Semaphore(0)
        self.threading = SimpleNamespace(
            Lock=lambda: _Lock(self),
            Condition=lambda lock: _Condition(self, lock),
            Thread=lambda **how: _Thread(self, **how),
            current_thread=lambda: self.current,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        )
        self.queue = SimpleNamespace(SimpleQueue=lambda: _Queue(self), Empty=queue.Empty)
        self.time = SimpleNamespace(perf_counter=lambda: self.clock, monotonic=lambda: self.clock)

    def spawn(self, target: Callable[[], None]) -> None:
        """One more thread that runs from now on."""
        _Thread(self, target=target).start()

    def run(self) -> None:
        """Until all threads have ended or wait for ever."""
        while True:
            left = [thread for thread in self.threads if not thread.over]
            able = [thread for thread in left if thread.ready() or thread.until <= self.clock]
            if not able:
                self.clock = min((thread.until for thread in left), default=float("inf"))
                if self.clock == float("inf"):
                    return
                assert self.clock < _FOR_EVER, "one waits for ever, and others look now and then what has become of it"
                continue
            self.current = self.dice.choice(able)
            self.current.turn.release()
            self._turn.acquire()

    def pause(self, ready: Callable[[], Any] = lambda: True, seconds: float | None = None) -> None:
        """Let others go on until `ready`, but no longer than that."""
        me = self.current
        me.ready, me.until = ready, float("inf") if seconds is None else self.clock + seconds
        self._turn.release()
        me.turn.acquire()
        if me in self.targets:
            self.targets.discard(me)
            raise Thrown

    def ended(self) -> None:
        """The thread of this turn is over."""
        self.current.over = True
        self._turn.release()


class _Thread:
    def __init__(self, stage: Interleaved, target: Callable[[], None], name: str = "", daemon: bool = True) -> None:
        self.name, self.over, self.until = name, False, float("inf")
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], Any] = lambda: True
        self._stage, self._target = stage, target

    def start(self) -> None:
        self._stage.threads.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            self._target()
        finally:
            self._stage.ended()


class _Lock:
    def __init__(self, stage: Interleaved) -> None:
        self._stage, self.taken = stage, False

    def __enter__(self) -> None:
        self._stage.pause(lambda: not self.taken)
        self.taken = True

    def __exit__(self, *raised: object) -> None:
        self.taken = False


class _Condition:
    def __init__(self, stage: Interleaved, lock: _Lock) -> None:
        self._stage, self._lock, self._told = stage, lock, 0

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        until = float("inf") if seconds is None else self._stage.clock + seconds
        while not condition() and self._stage.clock < until:
            told = self._told
            with self._unlocked():
                left = None if seconds is None else until - self._stage.clock
                self._stage.pause(lambda told=told: self._told > told, left)  # type: ignore[misc]
        return condition()

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._lock.taken = False
        try:
            yield
        finally:
            self._stage.pause(lambda: not self._lock.taken)
            self._lock.taken = True

    def notify_all(self) -> None:
        self._told += 1


class _Queue:
    def __init__(self, stage: Interleaved) -> None:
        self._stage = stage
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._stage.pause()

    def get(self) -> Any:
        self._stage.pause(lambda: self._items)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)
