"""The logical lines of an answer, and how each wraps to rows of the screen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from rich.cells import cell_len, chop_cells
from rich.text import Text

_WIDE = (
    "\u1100-\u115f\u2e80-\u303e\u3041-\u33ff\u3400-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f"
    "\uff00-\uff60\uffe0-\uffe6"
)
_CLOSING = "\u3001\u3002\uff0c\uff0e\uff1a\uff1b\uff01\uff1f\uff09\u300d\u300f\u3011\u300b\u3009\u2019\u201d)\\]}!?,.;:"
_WORD = re.compile(f" +|[{_WIDE}][{_CLOSING}]*|[^ {_WIDE}]+[{_CLOSING}]*")
"""What is not split at the end of a row: a word, or a character of a script without spaces. Closing signs stay with
what they close.
"""
MIN_WIDTH = 8


@dataclass(frozen=True)
class ScreenRow:
    """One row of text on the screen."""

    text: Text
    end: int
    """The position in the logical line at which the row ends."""


class LogicalLine(Protocol):
    """A logical line of the answer, which takes one or more rows on the screen."""

    @property
    def group(self) -> int:
        """The number of the line's paragraph, code block or table: later text can change all lines of one group."""

    @property
    def size(self) -> int:
        """The position at which the line ends."""

    def rows(self, start: int, width: int) -> list[ScreenRow]:
        """Return the line from position `start` on, in rows of `width` cells."""


@dataclass(frozen=True)
class WrappedLine:
    """A logical line of words, wrapped at words."""

    group: int
    text: Text
    first_prefix: Text = field(default_factory=Text)
    """Stands before the first row."""
    rest_prefix: Text = field(default_factory=Text)
    """Stands before the other rows."""
    shape: str = ""
    """The text, with a letter in place of each character that cannot be markup."""

    @property
    def size(self) -> int:
        """The length in characters."""
        return len(self.text.plain)

    def rows(self, start: int, width: int) -> list[ScreenRow]:
        """Return the line from position `start` on, in rows of `width` cells. A line without words is one row."""
        max_width = max(width - self.rest_prefix.cell_len, MIN_WIDTH)
        rows = []
        for begin, end, next_begin in wrap_words(self.text.plain, start, max_width):
            rows.append(
                ScreenRow((self.rest_prefix if begin else self.first_prefix) + self.text[begin:end], next_begin)
            )
        return rows or ([ScreenRow(_without_trailing_blanks(self.first_prefix), 0)] if not self.size else [])


@dataclass(frozen=True)
class VerbatimLine:
    """A logical line that is printed unchanged. The terminal wraps it if it is too long, so that it is copied whole."""

    group: int
    text: Text

    @property
    def size(self) -> int:
        """The position at which the line ends: 1, since it is printed as a whole."""
        return 1

    def rows(self, start: int, width: int) -> list[ScreenRow]:
        """Return the line as one row, which is never wrapped; none if `start` is past its beginning."""
        return [] if start else [ScreenRow(self.text, 1)]


def wrap_words(text: str, start: int, width: int) -> list[tuple[int, int, int]]:
    """Wrap `text` at words, from `start` on: return where each row begins and ends, and where the next begins."""
    row_spans: list[tuple[int, int, int]] = []
    begin, end, used_cells = start, start, 0
    for match in _WORD.finditer(text, start):
        if match[0][0] == " ":
            if end == begin:  # no blank begins a row
                begin = end = match.end()
            else:
                used_cells += match.end() - match.start()
            continue
        cells = cell_len(match[0])
        if used_cells + cells > width and end > begin:
            row_spans.append((begin, end, match.start()))
            begin, used_cells = match.start(), 0
        end = match.end()
        if cells > width:
            position = begin
            *full_chunks, last = chop_cells(match[0], width)
            for chunk in full_chunks:
                row_spans.append((position, position + len(chunk), position + len(chunk)))
                position += len(chunk)
            begin, cells = position, cell_len(last)
        used_cells += cells
    if end > begin:
        row_spans.append((begin, end, len(text)))
    return row_spans


def fold_rows(text: Text, width: int) -> list[Text]:
    """Return a line in rows of `width` cells, as a terminal wraps it, in the middle of words."""
    rows, position = [], 0
    for chunk in chop_cells(text.plain, width):
        rows.append(text[position : position + len(chunk)])
        position += len(chunk)
    return rows or [text]


def _without_trailing_blanks(prefix: Text) -> Text:
    """Return a prefix without the blanks at its end."""
    bare = prefix.copy()
    bare.rstrip()
    return bare
