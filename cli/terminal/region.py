"""Temporary rows at the bottom of a terminal, below the text that stays.

The cursor rests at the beginning of the first temporary row, which is the beginning of a line. The terminal may move
that line and break other lines when its window changes. Erasing from the cursor on still erases these rows and nothing
else.

A frame is one write. Terminals that know synchronized updates never show half of it, since the frame is between their
marks. Rows that stay the same are overwritten, not erased.

Temporary rows never wrap. The terminal wraps the text that stays, so nothing is lost if the window is narrower than the
program knows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal.harmless import strip_controls

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
BEGIN, END = "\x1b[?2026h" + HIDE, "\x1b[?2026l"  # each frame hides the cursor: a shell may have shown it
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
ERASE_BELOW, ERASE_REST = "\x1b[J", "\x1b[K"


class LiveRegion:
    """Temporary rows at the bottom of the terminal of `console`, removed at the end of its `with`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_frame = ""

    def __enter__(self) -> LiveRegion:
        return self

    def __exit__(self, *exception: object) -> None:
        self._write(ERASE_BELOW + SHOW)

    def show(self, lines: Sequence[Text], rows: Sequence[Text]) -> None:
        """Print `lines` permanently, and replace the rows below them by `rows`."""
        size: tuple[int, int] | None = None
        while size != self._console.size:  # drawing takes a moment, and a frame for a higher window would scroll away
            width, height = size = self._console.size
            frame = self._draw_rows(rows[-max(height - 1, 1) :], width)
        if lines:
            permanent_text = "".join(f"{self._to_ansi(line)}\n" for line in lines)
            self._write(BEGIN + ERASE_BELOW + permanent_text + frame + END)
        elif frame != self._last_frame:
            self._write(BEGIN + frame + END)
        self._last_frame = frame

    def _draw_rows(self, rows: Sequence[Text], width: int) -> str:
        """Return the control sequences and text that draw the rows and put the cursor back to their beginning."""
        drawn_rows = []
        for number, row in enumerate(rows):
            last, row = number == len(rows) - 1, row.copy()
            row.truncate(max(width - last, 1), overflow="ellipsis")
            rest = "" if last or row.cell_len >= width else ERASE_REST  # at the edge it would erase the last cell
            drawn_rows.append(self._to_ansi(row) + rest)
        cursor_up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        return NO_WRAP + "\n".join(drawn_rows) + ERASE_BELOW + WRAP + cursor_up + "\r"

    def _to_ansi(self, text: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(text, end="", soft_wrap=True)
        return capture.get()

    def _write(self, text: str) -> None:
        """Write to the terminal and flush."""
        self._console.file.write(text)
        self._console.file.flush()


class AboveRegionWriter(io.TextIOBase):
    """A replacement for stderr that prints whole lines by `show`, above the live region."""

    def __init__(self, show: Callable[[list[Text]], None]) -> None:
        self._show = show
        self._partial_line = ""

    def isatty(self) -> bool:
        """Return True: the text goes to a terminal."""
        return True

    def write(self, text: str) -> int:
        """Print the complete lines of the text, and hold back an incomplete one."""
        from rich.text import Text

        *lines, self._partial_line = (self._partial_line + text).split("\n")
        if lines:
            self._show([Text(strip_controls(Text.from_ansi(line).plain)) for line in lines])
        return len(text)
