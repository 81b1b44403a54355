"""The status line of a long run: live on a terminal, or a line every ten seconds in a log."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Self

from cortexmlx.cli.terminal import console
from cortexmlx.errors import CortexError

LIVE_SECONDS = 0.25
LOG_SECONDS = 10.0


class StatusLine:
    """Shows a run's status on stderr from a thread while its context is open: `line` returns the text. It ends when
    `line` raises CortexError.

    `live`: False if the results go to stdout. On a terminal, no live line is then drawn over them.
    """

    def __init__(self, line: Callable[[], str], *, live: bool) -> None:
        self._format_line = line
        self._status: Any = None
        if console.is_terminal(sys.stderr) and (live or not sys.stdout.isatty()):
            from rich.status import Status

            self._status = Status("starting", console=console.stderr())
        self._interval = LIVE_SECONDS if self._status else LOG_SECONDS
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="cortexmlx-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_event.set()
        self._thread.join()
        if self._status:
            self._status.stop()

    def _refresh(self) -> None:
        """Show the status again and again until the context ends."""
        from rich.text import Text

        while not self._stop_event.wait(self._interval):
            try:
                line = self._format_line()
            except CortexError:  # the engine has ended; the run reports it
                return
            if self._status:
                self._status.update(Text(line))
            else:
                console.print_note(line)
