"""Rows at the bottom of a terminal that come and go below the text that stays.

The cursor rests at the beginning of the first of these rows, which is the beginning of a line. Wherever the terminal
puts that line when its window changes, and however it breaks the other lines, erasing from there erases these rows and
nothing else. A frame is one write, between the marks of a synchronized update for terminals that know them, so no half
of it is seen. Rows that stay are overwritten, not erased. These rows never wrap. Text that stays wraps as the terminal
does it, so nothing is lost if the window gets narrower than the program knows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal.harmless import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
BEGIN, END = "\x1b[?2026h" + HIDE, "\x1b[?2026l"  # each frame hides the cursor: a shell may have shown it
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
ERASE_BELOW, ERASE_REST = "\x1b[J", "\x1b[K"


class Region:
    """Temporary rows in a terminal that `console` writes to. Use it in a `with`; afterwards the rows are gone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ""

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exception: object) -> None:
        self._write(ERASE_BELOW + SHOW)

    def show(self, lines: Sequence[Text], rows: Sequence[Text]) -> None:
        """Print `lines` permanently, and replace the rows below them by `rows`."""
        width, height = self._console.size
        shown = self._rows(rows[-max(height - 1, 1) :], width)
        if lines:
            stay = "".join(f"{self._ansi(line)}\n" for line in lines)
            self._write(BEGIN + ERASE_BELOW + stay + shown + END)
        elif shown != self._shown:
            self._write(BEGIN + shown + END)
        self._shown = shown

    def _rows(self, rows: Sequence[Text], width: int) -> str:
        drawn = []
        for number, row in enumerate(rows):
            last, row = number == len(rows) - 1, row.copy()
            row.truncate(max(width - last, 1), overflow="ellipsis")
            rest = "" if last or row.cell_len >= width else ERASE_REST  # at the edge it would erase what is there
            drawn.append(self._ansi(row) + rest)
        up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        return NO_WRAP + "\n".join(drawn) + ERASE_BELOW + WRAP + up + "\r"

    def _ansi(self, text: Text) -> str:
        with self._console.capture() as written:
            self._console.print(text, end="", soft_wrap=True)
        return written.get()

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class Above(io.TextIOBase):
    """Replaces stderr: whole lines that are written to it are printed by `show`, above the region."""

    def __init__(self, show: Callable[[list[Text]], None]) -> None:
        self._show = show
        self._begun = ""

    def isatty(self) -> bool:
        """Return True: it is a terminal's."""
        return True

    def write(self, text: str) -> int:
        """Print the complete lines."""
        from rich.text import Text

        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._show([Text(harmless(Text.from_ansi(line).plain)) for line in lines])
        return len(text)
