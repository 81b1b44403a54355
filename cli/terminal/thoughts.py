"""A model's thoughts on stderr, while its answer goes to stdout."""

from __future__ import annotations

import sys

from cortexmlx.cli.terminal import console


class ThoughtsPrinter:
    """Prints thoughts as they come, and parts them from the answer behind them. `hidden`: prints nothing."""

    def __init__(self, *, hidden: bool = False) -> None:
        self._hidden = hidden
        self._open = False

    def show(self, text: str) -> None:
        """One more piece, if it is one."""
        if self._hidden or not text:
            return
        if not self._open and console.is_coloured(sys.stderr):
            console.control(sys.stderr, "\x1b[2m")
        self._open = True
        console.tell(text, end="")

    def end(self) -> None:
        """The answer begins, or there is none: the line and its style end. Safe to call again."""
        if self._open:
            self._open = False
            if console.is_coloured(sys.stderr):
                console.control(sys.stderr, "\x1b[0m")
            console.tell("\n")
