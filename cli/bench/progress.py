"""Show on stderr what is being measured: a live line for a person, a line now and then for a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import in_a_line

LOG_SECONDS = 10.0


@contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """Yield a function that is called with the name of what is running."""
    if not console.is_terminal(sys.stderr):
        yield _Log()
        return
    from rich.text import Text

    with console.stderr().status("starting") as status:

        def update(what: str) -> None:
            status.update(Text(in_a_line(what)))

        yield update


class _Log:
    """A log that prints a line only if the last one is `LOG_SECONDS` ago."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LOG_SECONDS

    def __call__(self, what: str) -> None:
        if time.monotonic() >= self._next:
            console.note(what)
            self._next = time.monotonic() + LOG_SECONDS
