"""Network work on a background thread, so that Ctrl-C never waits for the network."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from cortexmlx.progress import OnProgress, Progress

T = TypeVar("T")

_EVERY_SECONDS = 0.1
_RATE_SECONDS = 5.0
"""The rate is that of the last so many seconds."""


class Stopped(Exception):
    """Nobody wants the rest of the download any more: raised in its own threads only."""


class DownloadProgress:
    """What a download's threads have brought, in bytes. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._total = self._done = self._cached = 0
        self._lately: deque[tuple[float, int]] = deque()

    def expect(self, size: int, cached: int) -> None:
        """A file of `size` bytes belongs to it, of which `cached` are here."""
        with self._lock:
            self._total += size
            self._done += cached
            self._cached += cached

    def add(self, size: int) -> None:
        """So many bytes have come; less than none if they are of no use. Raises Stopped."""
        with self._lock:
            self._done += size
            self._cached = min(self._cached, self._done)
        if self._stopped.is_set():
            raise Stopped

    def stop(self) -> None:
        """Let the threads end where they next look."""
        self._stopped.set()

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises Stopped."""
        if self._stopped.wait(seconds):
            raise Stopped

    def progress(self) -> Progress:
        """How far it is now, and how fast lately."""
        now = time.monotonic()
        with self._lock:
            came = self._done - self._cached
            if not self._total:
                return Progress("downloading", 0, 0)
            self._lately.append((now, came))
            while now - self._lately[0][0] > _RATE_SECONDS:
                self._lately.popleft()
            since, before = self._lately[0]
            rate = max(0.0, (came - before) / (now - since)) if now > since else 0.0
            return Progress("downloading", self._done, self._total, self._cached, rate)


def follow(work: Callable[[DownloadProgress], T], on_progress: OnProgress) -> T:
    """What `work` returns, which is called on a thread of its own; meanwhile `on_progress` is told ten times a second
    on this one. Whatever it raises ends the waiting at once and the work at its next byte.
    """
    tally = DownloadProgress()
    outcome: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(tally), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="cortexmlx-download", daemon=True).start()
    try:
        while True:
            try:
                result, error = outcome.get(timeout=_EVERY_SECONDS)
                break
            except queue.Empty:
                on_progress(tally.progress())
        if error is None and (last := tally.progress()).total:
            on_progress(last)
    except BaseException:
        tally.stop()
        raise
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
