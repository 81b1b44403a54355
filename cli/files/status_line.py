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
        self._shown = line
        self._status: Any = None
        if console.is_terminal(sys.stderr) and (live or not sys.stdout.isatty()):
            from rich.status import Status

            self._status = Status("starting", console=console.stderr())
        self._every = LIVE_SECONDS if self._status else LOG_SECONDS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="cortexmlx-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        if self._status:
            self._status.stop()

    def _refresh(self) -> None:
        """Show the status again and again until the context ends."""
        from rich.text import Text

        while not self._over.wait(self._every):
            try:
                line = self._shown()
            except CortexError:  # the engine has ended; the run reports it
                return
            if self._status:
                self._status.update(Text(line))
            else:
                console.print_note(line)
