"""pyte's screen with what people's terminals do besides: they keep what scrolls off, and fit it to a new width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyte
from pyte import modes
from pyte.screens import Char, StaticDefaultDict
from wcwidth import wcwidth

Row = StaticDefaultDict
"""The cells of a row by column. `continued` is set where the terminal itself broke a line: the next row goes on."""

FAINT = "868887"
"""The colour of faint text here, as pyte names colours of 24 bits: it knows no faint text itself."""


class Emulator(pyte.Screen):
    """A screen and its scrollback.

    `reflow` says what a change of the width does to lines that are there already. True, as in Terminal.app, iTerm2,
    kitty, GNOME's terminal and tmux: lines are broken anew, and the cursor stays at its character. False, as in xterm:
    what is right of the edge is gone. When the window gets lower, rows leave at the top for the scrollback, those
    below the cursor first.
    """

    def __init__(self, columns: int, lines: int, *, reflow: bool = True) -> None:
        self.scrollback: list[Row] = []
        self.reflow = reflow
        super().__init__(columns, lines)

    def draw(self, data: str) -> None:
        """As pyte, but a row that the terminal breaks is marked, and no wide character straddles the edge."""
        for char in data:
            if modes.DECAWM in self.mode and self.cursor.x + (wcwidth(char) == 2) >= self.columns:
                self.buffer[self.cursor.y].continued = True
                self.cursor.x = self.columns
            super().draw(char)

    def index(self) -> None:
        """As pyte, but that the row which leaves at the top is kept."""
        if self.cursor.y == self.lines - 1 and not self.margins:
            self.scrollback.append(self.buffer[0])
        super().index()

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        """As pyte; a row without its end does not go on."""
        super().erase_in_line(how, private)
        if how != 1:
            self.buffer[self.cursor.y].continued = False

    def erase_in_display(self, how: int = 0, *args: Any, **kwargs: Any) -> None:
        """As pyte; rows that were erased do not go on."""
        super().erase_in_display(how, *args, **kwargs)
        for y in range(self.cursor.y + 1 if how == 0 else 0, self.cursor.y if how == 1 else self.lines):
            self.buffer[y].continued = False
        if how == 3:
            self.scrollback.clear()

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """The window has another size."""
        lines, columns = lines or self.lines, columns or self.columns
        rows = [*self.scrollback, *(self.buffer[y] for y in range(self._used()))]
        at = len(self.scrollback) + self.cursor.y
        if columns != self.columns:
            rows, at, self.cursor.x = (
                self._rewrapped(rows, at, columns)
                if self.reflow
                else ([self._cropped(row, columns) for row in rows], at, min(self.cursor.x, columns - 1))
            )
        top = min(max(len(rows) - lines, 0), at)
        if not self.reflow:
            top = max(top, at - lines + 1)
        self.scrollback = rows[:top]
        self.buffer.clear()
        self.buffer.update(enumerate(rows[top : top + lines]))
        self.cursor.y = at - top
        self.lines, self.columns = lines, columns
        self.set_margins()
        self.tabstops = set(range(8, columns, 8))

    def select_graphic_rendition(self, *attrs: int) -> None:
        """As pyte, but that faint text has a colour of its own."""
        super().select_graphic_rendition(*attrs)
        if 2 in attrs and not {38, 48} & set(attrs):  # behind these a 2 belongs to a colour
            self.cursor.attrs = self.cursor.attrs._replace(fg=FAINT)
        elif 22 in attrs and self.cursor.attrs.fg == FAINT:
            self.cursor.attrs = self.cursor.attrs._replace(fg="default")

    def rows(self) -> list[str]:
        """What is on the screen, without the spaces at the ends of rows."""
        return [self._text(self.buffer[y]).rstrip() for y in range(self.lines)]

    def all_rows(self) -> list[str]:
        """Those of the scrollback and of the screen, without the spaces at their ends."""
        return [*(self._text(row).rstrip() for row in self.scrollback), *self.rows()]

    def text_lines(self) -> list[str]:
        """Everything from the beginning of the scrollback, as it is copied: without the terminal's breaks."""
        rows = [*self.scrollback, *(self.buffer[y] for y in range(self._used()))]
        return ["".join(map(self._text, line)).rstrip() for line in _grouped(rows)]

    def _text(self, row: Row) -> str:
        return "".join(row[x].data for x in range(max(row, default=-1) + 1))

    def _used(self) -> int:
        """The rows of the screen down to the cursor or the last that shows something."""
        filled = (y for y in range(self.lines) if self._text(self.buffer[y]).strip())
        return max(self.cursor.y, *filled, 0) + 1

    def _rewrapped(self, rows: list[Row], at: int, columns: int) -> tuple[list[Row], int, int]:
        fitted: list[Row] = []
        passed, where = 0, (0, 0)
        for line in _grouped(rows):
            cells = [cell for row in line[:-1] for cell in self._cells(row, self.columns)]
            here = at - passed if passed <= at < passed + len(line) else None
            offset = None if here is None else here * self.columns + self.cursor.x
            last = self._cells(line[-1], max(line[-1], default=-1) + 1)
            cells += last
            while cells and cells[-1].data == " " and (offset is None or len(cells) > offset):
                cells.pop()
            begin = len(fitted)
            fitted += self._wrapped(cells, columns)
            if offset is not None:
                where = (begin + min(offset // columns, len(fitted) - begin - 1), min(offset % columns, columns - 1))
            passed += len(line)
        return fitted, *where

    def _wrapped(self, cells: list[Char], columns: int) -> list[Row]:
        made: list[Row] = []
        while True:
            take = columns
            if len(cells) > columns and cells[columns].data == "":  # the second half of a wide character
                take -= 1
            row = Row(self.default_char)
            row.update(enumerate(cells[:take]))
            made.append(row)
            cells = cells[take:]
            if not cells:
                return made
            row.continued = True

    def _cells(self, row: Row, columns: int) -> list[Char]:
        return [row[x] for x in range(columns)]

    def _cropped(self, row: Row, columns: int) -> Row:
        for x in [x for x in row if x >= columns]:
            del row[x]
        row.continued = False
        return row


def _grouped(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows of each line that the program wrote."""
    line: list[Row] = []
    for row in rows:
        line.append(row)
        if not getattr(row, "continued", False):
            yield line
            line = []
    if line:
        yield line
