"""Draw an answer while it grows: final text once, and a live region below it a few times a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stderr
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal.console import is_terminal
from cortexmlx.cli.terminal.region import AboveRegionWriter, LiveRegion

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MAX_TIME_SHARE = 60
"""Drawing takes one part in this many of the time, at most: after d seconds of drawing, the next comes 60 d later."""
SOONEST_SECONDS, LATEST_SECONDS = 0.03, 0.5
TICK_SECONDS = 0.1

SuspensionGuard = Callable[[AbstractContextManager[object]], AbstractContextManager[object]]
"""Makes a context in which the program does not stop while another thread holds the lock: see `signals.py`."""


class LiveDrawing:
    """Draws what `draw` returns above and into a live region, a few times a second from a thread. For use in a `with`.

    `draw` returns the lines that are final now, and the rows below them. `lock` is held during `draw` and protects what
    it reads.
    """

    def __init__(
        self,
        console: Console,
        draw: Callable[[], tuple[Sequence[Text], Sequence[Text]]],
        rows_below: Callable[[], Sequence[Text]],
        suspension_guard: SuspensionGuard = nullcontext,
    ) -> None:
        self.lock = threading.RLock()
        self.region = LiveRegion(console)
        self._draw = draw
        self._rows_below = rows_below
        self._suspension_guard = suspension_guard
        self._next_redraw_time = 0.0
        self._stop_event = threading.Event()
        self._ticker = threading.Thread(target=self._redraw_periodically, name="cortexmlx-view", daemon=True)
        self._stack = ExitStack()

    def __enter__(self) -> LiveDrawing:
        self._stack.enter_context(self.region)
        if is_terminal(sys.stderr):  # a warning goes above the region, not into it
            self._stack.enter_context(redirect_stderr(AboveRegionWriter(self._print_above)))
        self._stack.enter_context(self._suspension_guard(self.lock))
        self._ticker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self._stack.close()

    def end(self) -> None:
        """Stop drawing. Safe to call again."""
        self._stop_event.set()
        self._ticker.join()

    def request_redraw(self) -> None:
        """Redraw the region now. If it was drawn just before, the thread redraws it at its next tick."""
        with self.lock:
            start_time = time.monotonic()
            if start_time >= self._next_redraw_time:
                self.region.show(*self._draw())
                now = time.monotonic()
                self._next_redraw_time = now + min(
                    max(MAX_TIME_SHARE * (now - start_time), SOONEST_SECONDS), LATEST_SECONDS
                )

    def _redraw_periodically(self) -> None:
        """Redraw the region a few times a second until the end."""
        while not self._stop_event.wait(TICK_SECONDS):
            self.request_redraw()

    def _print_above(self, lines: list[Text]) -> None:
        """Print lines that other code wrote to stderr above the region."""
        with self.lock:
            self.region.show(lines, self._rows_below())
