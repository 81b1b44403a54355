"""Network work on a background thread, so that Ctrl-C never waits for the network."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from cortexmlx.types.progress import OnProgress, Progress

T = TypeVar("T")

_EVERY_SECONDS = 0.1
_RATE_SECONDS = 5.0
"""The rate is the mean over this many seconds."""


class DownloadStopped(Exception):
    """The caller has stopped the download. Raised in the download's own threads only."""


class DownloadProgress:
    """The bytes that a download has received. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._total = self._done = self._cached = 0
        self._lately: deque[tuple[float, int]] = deque()

    def expect(self, size: int, cached: int) -> None:
        """Add a file of `size` bytes to the download. `cached` of them are on this machine already."""
        with self._lock:
            self._total += size
            self._done += cached
            self._cached += cached

    def add(self, size: int) -> None:
        """Count `size` received bytes. A negative size takes back bytes that cannot be used. Raises DownloadStopped."""
        with self._lock:
            self._done += size
            self._cached = min(self._cached, self._done)
        if self._stopped.is_set():
            raise DownloadStopped

    def stop(self) -> None:
        """Make the download's threads end at their next call of `add` or `pause`."""
        self._stopped.set()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`. Raises DownloadStopped."""
        if self._stopped.wait(seconds):
            raise DownloadStopped

    def progress(self) -> Progress:
        """Return the progress so far, with the recent rate."""
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


def run_in_background(work: Callable[[DownloadProgress], T], on_progress: OnProgress) -> T:
    """Call `work` on a thread of its own and return its result. Meanwhile call `on_progress` on this thread, ten times
    a second.

    An exception in this thread ends the waiting at once. The work then ends at its next byte.
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
