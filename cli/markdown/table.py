"""Tables: columns as wide as their cells, narrower in a narrow window, and none in a window that is too narrow."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from cortexmlx.cli.markdown.flows import ScreenRow, wrapped
from cortexmlx.cli.markdown.styles import FAINT, HEADING

NARROWEST = 5
"""Cells per column. In a narrower window, a row becomes lines of `heading: cell`."""
BETWEEN = " │ "

Cells = tuple[Text, ...]


@dataclass(frozen=True)
class Printed:
    """What is printed already of a table."""

    widths: tuple[int, ...]
    """The widths of the columns, in cells."""
    gone: int = 0
    """Rows of the body that are no longer in the text."""


@dataclass(frozen=True)
class TableRow:
    """A row of a table."""

    group: int
    number: int
    """0 for the heading, from 1 on for the body."""
    cells: Cells
    headings: Cells
    alignments: tuple[str, ...]
    widths: tuple[int, ...]
    """The preferred widths of the columns, in cells."""

    @property
    def size(self) -> int:
        """1, since the row is printed as a whole."""
        return 1

    def rows(self, start: int, width: int) -> list[ScreenRow]:
        """Return the row's lines on the screen, with a rule below the heading."""
        if start:
            return []
        room = width - len(BETWEEN) * (len(self.headings) - 1)
        if room < NARROWEST * len(self.headings):
            return [ScreenRow(text, 1) for text in self._listed(width)]
        words = (max(map(cell_len, cell.plain.split()), default=0) for cell in self.cells)
        # A word that is wider than its printed column sticks out, so that it is not broken.
        widths = fitted(tuple(max(wish, word) for wish, word in zip(self.widths, words, strict=True)), room)
        texts = self._in_columns(widths)
        if not self.number:
            for text in texts:
                text.stylize(HEADING)
            texts.append(Text("─┼─".join("─" * w for w in widths), FAINT))
        return [ScreenRow(text, 1) for text in texts]

    def _in_columns(self, widths: tuple[int, ...]) -> list[Text]:
        columns = []
        for cell, width in zip(self.cells, widths, strict=True):
            columns.append([cell[begin:end] for begin, end, _ in wrapped(cell.plain, 0, width)])
        texts = []
        for at in range(max(1, *map(len, columns))):
            row = Text()
            for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
                if number:
                    row.append(BETWEEN, FAINT)
                row.append_text(_aligned(column[at] if at < len(column) else Text(), width, self.alignments[number]))
            row.rstrip()
            texts.append(row)
        return texts

    def _listed(self, width: int) -> list[Text]:
        if not self.number:
            return []
        texts = [] if self.number == 1 else [Text()]
        for heading, cell in zip(self.headings, self.cells, strict=True):
            line = Text.assemble(Text(heading.plain, HEADING), ": ", cell)
            texts += [line[begin:end] for begin, end, _ in wrapped(line.plain, 0, width)]
        return texts


def fitted(wishes: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Return widths of at most `room` in all. The widest columns give way first."""
    low, high = 1, max(wishes, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(wish, middle) for wish in wishes) <= room:
            low = middle
        else:
            high = middle - 1
    widths = [min(wish, low) for wish in wishes]
    spare = room - sum(widths)
    for number, wish in enumerate(wishes):
        if widths[number] < wish and spare > 0:
            widths[number] += 1
            spare -= 1
    return tuple(widths)


def _aligned(text: Text, width: int, alignment: str) -> Text:
    text = text.copy()
    free = max(width - text.cell_len, 0)
    left = free if alignment == "right" else free // 2 if alignment == "center" else 0
    text.pad_left(left)
    text.pad_right(free - left)
    return text
