"""StatusLine: how far a long run is, in a live line for a person, or in a line every ten seconds for a log."""

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
    """A thread that shows what `line` returns on stderr, in its context. It ends when `line` raises CortexError.

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
        self._thread = threading.Thread(target=self._watch, name="cortexmlx-progress", daemon=True)

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

    def _watch(self) -> None:
        from rich.text import Text

        while not self._over.wait(self._every):
            try:
                line = self._shown()
            except CortexError:  # the engine has ended; the run reports it
                return
            if self._status:
                self._status.update(Text(line))
            else:
                console.note(line)
