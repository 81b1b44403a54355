"""Markdown tables: columns as wide as their cells, narrower in a narrow window; lists of cells where columns do not
fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from cortexmlx.cli.markdown.flows import ScreenRow, wrap_words
from cortexmlx.cli.markdown.styles import FAINT, HEADING

MIN_COLUMN_WIDTH = 5
"""Cells per column. In a narrower window, a row becomes lines of `heading: cell`."""
COLUMN_SEPARATOR = " │ "

Cells = tuple[Text, ...]


@dataclass(frozen=True)
class PrintedTable:
    """The printed part of an open table: its column widths and the rows already dropped."""

    widths: tuple[int, ...]
    """The widths of the columns, in cells."""
    dropped_rows: int = 0
    """Rows of the body that are no longer in the text."""


@dataclass(frozen=True)
class TableRow:
    """A row of a table, as a logical line."""

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
        max_width = width - len(COLUMN_SEPARATOR) * (len(self.headings) - 1)
        if max_width < MIN_COLUMN_WIDTH * len(self.headings):
            return [ScreenRow(text, 1) for text in self._list_lines(width)]
        word_widths = (max(map(cell_len, cell.plain.split()), default=0) for cell in self.cells)
        # A word that is wider than its printed column sticks out, so that it is not broken.
        widths = fit_widths(
            tuple(max(wish, word_width) for wish, word_width in zip(self.widths, word_widths, strict=True)), max_width
        )
        texts = self._column_lines(widths)
        if not self.number:
            for text in texts:
                text.stylize(HEADING)
            texts.append(Text("─┼─".join("─" * w for w in widths), FAINT))
        return [ScreenRow(text, 1) for text in texts]

    def _column_lines(self, widths: tuple[int, ...]) -> list[Text]:
        """Return the row's lines in columns of these widths."""
        columns = []
        for cell, width in zip(self.cells, widths, strict=True):
            columns.append([cell[begin:end] for begin, end, _ in wrap_words(cell.plain, 0, width)])
        texts = []
        for line_index in range(max(1, *map(len, columns))):
            row = Text()
            for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
                if number:
                    row.append(COLUMN_SEPARATOR, FAINT)
                row.append_text(
                    _align_cell(
                        column[line_index] if line_index < len(column) else Text(), width, self.alignments[number]
                    )
                )
            row.rstrip()
            texts.append(row)
        return texts

    def _list_lines(self, width: int) -> list[Text]:
        """Return the row as lines of `heading: cell`, for a narrow window."""
        if not self.number:
            return []
        texts = [] if self.number == 1 else [Text()]
        for heading, cell in zip(self.headings, self.cells, strict=True):
            line = Text.assemble(Text(heading.plain, HEADING), ": ", cell)
            texts += [line[begin:end] for begin, end, _ in wrap_words(line.plain, 0, width)]
        return texts


def fit_widths(wishes: tuple[int, ...], max_width: int) -> tuple[int, ...]:
    """Return column widths of at most `max_width` in all. The widest columns shrink first."""
    low, high = 1, max(wishes, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(wish, middle) for wish in wishes) <= max_width:
            low = middle
        else:
            high = middle - 1
    widths = [min(wish, low) for wish in wishes]
    spare = max_width - sum(widths)
    for number, wish in enumerate(wishes):
        if widths[number] < wish and spare > 0:
            widths[number] += 1
            spare -= 1
    return tuple(widths)


def _align_cell(text: Text, width: int, alignment: str) -> Text:
    """Return a cell's text padded to its column's width."""
    text = text.copy()
    padding = max(width - text.cell_len, 0)
    left_padding = padding if alignment == "right" else padding // 2 if alignment == "center" else 0
    text.pad_left(left_padding)
    text.pad_right(padding - left_padding)
    return text
