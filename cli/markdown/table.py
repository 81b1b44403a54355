"""Tables: columns as wide as their cells, narrower in a narrow window, no columns in one that is too narrow."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from cortexmlx.cli.markdown.flows import ScreenRow, wrapped
from cortexmlx.cli.markdown.styles import FAINT, HEADING

NARROWEST = 5
"""Cells; with less for each column, a row becomes lines of `heading: cell`."""
BETWEEN = " │ "

Cells = tuple[Text, ...]


@dataclass(frozen=True)
class Printed:
    """Of a table of which rows have been printed already: the widths of its columns, and how many rows of its body are
    not in its text any more."""

    widths: tuple[int, ...]
    gone: int = 0


@dataclass(frozen=True)
class TableRow:
    """One row: the heading (`number` 0) or a row of the body. `widths` are those that the columns would like."""

    group: int
    number: int
    cells: Cells
    headings: Cells
    alignments: tuple[str, ...]
    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        """A row is printed as a whole."""
        return 1

    def rows(self, start: int, width: int) -> list[ScreenRow]:
        """The row's rows, and below the heading a rule."""
        if start:
            return []
        room = width - len(BETWEEN) * (len(self.headings) - 1)
        if room < NARROWEST * len(self.headings):
            return [ScreenRow(text, 1) for text in self._listed(width)]
        words = (max(map(cell_len, cell.plain.split()), default=0) for cell in self.cells)
        # One that is wider than the rows before it, which have been printed, sticks out rather than be broken.
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
    """Widths that together are at most `room`: the widest columns give way first."""
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
