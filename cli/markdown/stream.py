"""Render Markdown while it is being written: rows are printed once and never changed, at any width.

The text since the last finished block is parsed whenever it has grown. A block that no later text can change is printed
and forgotten, so the work per piece of text does not grow with the answer.

Rows of the open block that no later text can change are printed, too. `pending` has its other rows as they look now.
How far a block is printed is a place in its text, not a number of rows: the width may change at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.text import Text

from cortexmlx.cli.markdown.blocks import MarkdownBlock, lines_length, parse_blocks, stable_prefix
from cortexmlx.cli.markdown.code import Highlighter
from cortexmlx.cli.markdown.flows import LogicalLine, ScreenRow, VerbatimLine, WrappedLine, wrap_words
from cortexmlx.cli.markdown.render import OPEN_MARKUP, render_block
from cortexmlx.cli.markdown.table import PrintedTable, TableRow
from cortexmlx.cli.terminal.harmless import strip_controls

PARSE_RATE = 64
"""Characters that the parser may read per character of the answer."""
PARSE_BURST = 20_000
"""Characters that the parser may read in addition. An answer of usual length never uses them up."""


class ParseBudget:
    """How many characters the Markdown parser may still read, so that its work grows linearly with the answer.

    One reading may overdraw the budget, and the next then waits for more text. So all readings of `n` characters of
    text are at most `PARSE_RATE * n + PARSE_BURST` and one reading.
    """

    def __init__(self) -> None:
        self._remaining = PARSE_BURST

    def earn(self, characters: int) -> None:
        """Add budget for new characters of the answer."""
        self._remaining += PARSE_RATE * characters

    def spend(self, characters: int) -> None:
        """Subtract characters that the parser reads."""
        self._remaining -= characters

    def allows(self, characters: int = 0) -> bool:
        """Return whether more than `characters` of the budget are left."""
        return self._remaining > characters


ITEM, FENCE, TABLE, PARAGRAPH = "list_item_open", "fence", "table_open", "paragraph_open"
MARKS = ("*", "_", "~", "`")
"""Signs of inline markup. How many of them stand in a row decides what they mean."""
LETTER = re.compile(r"(?<!\\)(?=[^\W\d_])")
"""Places where a paragraph can be split: text that begins with a letter is a paragraph."""
SIGN = re.compile(r"(?<!\\)[*_~`\[<&|]")
MAX_SIGNS = 50
LONG_PARAGRAPH = 2000
"""Characters of a paragraph above which its printed part is forgotten."""
SPLIT_TRIES = 3
"""The number of places at which such a paragraph may be split."""

MAX_ROWS = 50
"""Rows of pending text that are looked at, at most."""

Place = tuple[int, int]
"""The number of a logical line in its block, and a position in that line."""


class OpenFence:
    """A fenced code block that is still being written. Its lines need no Markdown parser."""

    def __init__(self, opening_line: str, markup: str, info: str) -> None:
        self._indent = len(opening_line) - len(opening_line.lstrip(" "))
        self._closing_pattern = re.compile(rf" {{0,3}}{re.escape(markup[0])}{{{len(markup)},}}[ \t]*$")
        self._colours = Highlighter((info.split() or [""])[0])

    def is_closed_by(self, line: str) -> bool:
        """Return whether the code ends at this line."""
        return self._closing_pattern.match(line) is not None

    def unindent_line(self, line: str) -> str:
        """Return a line of code without the indentation of the fence, with spaces for tabs."""
        blanks = len(line) - len(line.lstrip(" "))
        return line[min(blanks, self._indent) :].expandtabs(8)

    def highlight_line(self, line: str) -> Text:
        """Return the next line of code in colours."""
        return self._colours.highlight_line(self.unindent_line(line))


class MarkdownStream:
    """Renders the Markdown of an answer as it arrives, in rows for the screen."""

    def __init__(self) -> None:
        self.pending: list[Text] = []
        self._open = ""
        self._fence: OpenFence | None = None
        self._last: str | None = None
        self._in_block = False
        self._printed_place: Place = (0, 0)
        self._table: PrintedTable | None = None
        self._paragraph_limit = LONG_PARAGRAPH
        self._budget = ParseBudget()
        self._read = 0
        self._last_pending: list[Text] = []

    def feed(self, text: str) -> None:
        """Add text to the answer."""
        text = strip_controls(text)
        self._open += text
        self._budget.earn(len(text))

    @property
    def has_printed(self) -> bool:
        """Whether any row has been printed."""
        return self._last is not None or self._in_block

    def take_final_rows(self, width: int, max_pending: int) -> list[Text]:
        """Return the rows that have become final since the last call, `width` cells wide.

        If more than `max_pending` rows are pending, the first of them become final as they look now. Columns of a table
        keep their widths, and signs of emphasis without an end stay signs. If the parser's budget is used up, nothing
        becomes final, and new text is pending as it was written.
        """
        if self._fence is None and not self._budget.allows():
            start = max(self._read, len(self._open) - width * min(max_pending, MAX_ROWS))
            new = self._open[start:].split("\n")
            rows = [Text(line[a:b]) for line in new for a, b, _ in wrap_words(line, 0, width)]
            self.pending = [*self._last_pending, *rows]
            return []
        final_rows = self._take_final_rows(width, max_pending)
        self._read, self._last_pending = len(self._open), self.pending
        return final_rows

    def _take_final_rows(self, width: int, max_pending: int) -> list[Text]:
        """Parse the open text and return the rows that have become final; the others become `pending`."""
        final_rows: list[Text] = []
        while True:
            if self._fence is not None:
                final_rows += self._take_code_rows(self._fence)
                if self._fence is not None:
                    was_in_block, gap = self._in_block, [*self._gap_before(FENCE)]
                    self.pending = [*gap, *self._unfinished_code_rows(self._fence, width, max_pending)]
                    self._in_block = was_in_block
                    return final_rows
            text = stable_prefix(self._open)
            if len(text) > self._paragraph_limit:  # open signs at its end must not hold back all of it
                text = text.rstrip("".join(MARKS))
            blocks = self._parse_blocks(text)
            for block in blocks[:-1]:
                final_rows += self._take_block_rows(block, width)
            if len(blocks) > 1:
                finished_length = lines_length(self._open, blocks[-1].begin)
                self._open, text = self._open[finished_length:], text[finished_length:]
                blocks = self._parse_blocks(text)
            if not (blocks and self._enter_fence(blocks[-1])):
                break
        if blocks:
            final_rows += self._take_open_block_rows(blocks[-1], text, width, max_pending)
        else:
            self.pending = self._preview_rows(width)
        return final_rows

    def take_remaining_rows(self, width: int) -> list[Text]:
        """Return the remaining rows when the answer has ended."""
        if self._open and not self._open.endswith("\n"):
            self._open += "\n"
        final_rows = self._take_final_rows(width, max_pending=10**9)
        for block in parse_blocks(self._open) if self._fence is None else ():
            final_rows += self._take_block_rows(block, width)
        self._open, self.pending, self._fence = "", [], None
        return final_rows

    def _enter_fence(self, block: MarkdownBlock) -> bool:
        """Enter a fenced code block if the last block begins one; return whether it does."""
        token = block.tokens[0]
        if block.kind != FENCE:
            return False
        start = lines_length(self._open, block.begin)
        opening_line, newline, rest = self._open[start:].partition("\n")
        if not newline:
            return False
        self._fence, self._open = OpenFence(opening_line, token.markup, token.info), rest
        return True

    def _take_code_rows(self, fence: OpenFence) -> Iterator[Text]:
        """Yield the complete lines of the open code block, up to its end."""
        *lines, _ = self._open.split("\n")
        for number, line in enumerate(lines):
            if fence.is_closed_by(line):
                self._open = self._open[lines_length(self._open, number + 1) :]
                self._fence = None
                self._mark_block_printed(FENCE)
                return
            yield from self._gap_before(FENCE)
            yield fence.highlight_line(line)
        self._open = self._open.rpartition("\n")[2]

    def _unfinished_code_rows(self, fence: OpenFence, width: int, max_pending: int) -> list[Text]:
        """Return the unfinished line of code, or only the end of a very long one."""
        if not self._open:
            return []
        line = fence.unindent_line(self._open)
        return [Text(line[max(len(line) // width - min(max_pending, MAX_ROWS), 0) * width :])]

    def _parse_blocks(self, text: str) -> list[MarkdownBlock]:
        """Parse a text into blocks, and charge it to the budget."""
        self._budget.spend(len(text))
        return parse_blocks(text)

    def _take_block_rows(self, block: MarkdownBlock, width: int) -> Iterator[Text]:
        """Yield the remaining rows of a finished block."""
        for _, row in self._unprinted_rows(render_block(block.tokens, self._table), width):
            yield from self._gap_before(block.kind)
            yield row.text
        self._mark_block_printed(block.kind)

    def _mark_block_printed(self, kind: str) -> None:
        """Record that a block is printed completely."""
        self._last = kind if self._in_block else self._last
        self._in_block, self._printed_place, self._table, self._paragraph_limit = False, (0, 0), None, LONG_PARAGRAPH

    def _gap_before(self, kind: str) -> Iterator[Text]:
        """Yield the empty line before a block; none at the start, between items, and after a block's first row."""
        if not self._in_block and self._last is not None and not kind == self._last == ITEM:
            yield Text()
        self._in_block = True

    def _take_open_block_rows(self, block: MarkdownBlock, text: str, width: int, max_pending: int) -> Iterator[Text]:
        """Yield the rows of the open block that cannot change any more."""
        lines = render_block(block.tokens, self._table)
        if lines:
            yield from self._take_rows_before(block, lines, _first_open_place(lines, text), width)
        self.pending = self._pending_rows(block, lines, text, width)
        if (
            len(self.pending) > max_pending
            and not text.endswith(MARKS)
            and (rows := self._unprinted_rows(lines, width))
        ):
            number, row = rows[min(len(self.pending) - max_pending, len(rows) - 1)]
            lines, text, mark = self._finalize_until(block, lines, text, (number, row.end))
            yield from self._take_rows_before(block, lines, min(mark, (number, row.end)), width)
            if block.kind == TABLE and self._table is not None and self._printed_place[0] > 1:
                lines, text = self._drop_printed_rows(self._table, block, lines, text)
            self.pending = self._pending_rows(block, lines, text, width)
        if block.kind == PARAGRAPH and len(text) > self._paragraph_limit:
            self._open = self._open[self._find_cut_length(lines, text) :]

    def _find_cut_length(self, lines: Sequence[LogicalLine], text: str) -> int:
        """Return how many characters to cut off the beginning of a long paragraph. `_printed_place` is then relative to
        the rest.

        Only printed characters are forgotten, and only if the rest still has the same words. So the work for a word
        does not grow with the paragraph.
        """
        number, position = self._printed_place
        plain_lines = _plain_lines(lines)
        printed_length = len("\n".join([*plain_lines[:number], ""])) + position
        full_text = "\n".join(plain_lines)
        for cut_match in [*LETTER.finditer(text, LONG_PARAGRAPH // 2, lines_length(text, number) + position)][
            : -SPLIT_TRIES - 1 : -1
        ]:
            forgotten_text, rest_lines = (
                "\n".join(self._paragraph_lines(text[: cut_match.start()])),
                self._paragraph_lines(text[cut_match.start() :]),
            )
            rest_start = len(full_text) - len("\n".join(rest_lines))
            if (
                rest_lines
                and full_text[:rest_start].rstrip() == forgotten_text
                and full_text[rest_start:] == "\n".join(rest_lines)
                and rest_start <= printed_length
            ):
                self._paragraph_limit, self._printed_place = (
                    LONG_PARAGRAPH,
                    _place_at(rest_lines, printed_length - rest_start),
                )
                return cut_match.start()
        self._paragraph_limit = len(text) + LONG_PARAGRAPH // 2
        return 0

    def _drop_printed_rows(
        self, table: PrintedTable, block: MarkdownBlock, lines: list[LogicalLine], text: str
    ) -> tuple[list[LogicalLine], str]:
        """Forget the printed rows of a table, so that the work for a row does not grow with the table."""
        dropped_count, body = self._printed_place[0] - 1, block.begin + 2
        begin, end = lines_length(text, body), lines_length(text, body + dropped_count)
        self._open = self._open[:begin] + self._open[end:]
        self._table, self._printed_place = PrintedTable(table.widths, table.dropped_rows + dropped_count), (1, 0)
        return [lines[0], *lines[1 + dropped_count :]], text[:begin] + text[end:]

    def _take_rows_before(
        self, block: MarkdownBlock, lines: Sequence[LogicalLine], mark: Place, width: int
    ) -> Iterator[Text]:
        """Yield the rows before `mark`. From there on, later text may change the last paragraph, code or table. The
        last row of words is held back, since more words may join it.
        """
        for (number, row), (next_number, next_row) in pairwise(self._unprinted_rows(lines, width)):
            is_wrapped = isinstance(lines[number], WrappedLine)
            is_held = (next_number, next_row.end) > mark if is_wrapped else number >= mark[0]
            if is_held and lines[number].group == lines[-1].group:
                return
            yield from self._gap_before(block.kind)
            yield row.text
            self._printed_place = (next_number, 0) if next_number != number else (number, row.end)

    def _finalize_until(
        self, block: MarkdownBlock, lines: list[LogicalLine], text: str, end_place: Place
    ) -> tuple[list[LogicalLine], str, Place]:
        """Make everything before `end_place` final: columns keep their widths, and emphasis signs without an end are
        escaped.

        Escaping changes the text. All such signs are escaped at once, since one parse for each would use up the budget
        on signs that have found their end.
        """
        if isinstance(lines[-1], TableRow):
            self._table = PrintedTable(lines[-1].widths, self._table.dropped_rows if self._table else 0)
            lines = render_block(block.tokens, self._table)
            return lines, text, _end_place(lines)
        plain_lines, rest = _plain_lines(lines), self._open[len(text) :]
        bounds = [0, *_unmatched_signs(lines, text, end_place), len(text)]
        escaped_text = "\\".join(text[start:end] for start, end in pairwise(bounds))
        lines, text = self._try_escape(lines, text, plain_lines, escaped_text)
        original_text = text
        for sign in [*SIGN.finditer(original_text)][:MAX_SIGNS]:
            if _first_open_place(lines, text) >= end_place or not self._budget.allows():
                break
            position = sign.start() + len(text) - len(original_text)
            lines, text = self._try_escape(lines, text, plain_lines, f"{text[:position]}\\{text[position:]}")
        self._open = text + rest
        return lines, text, _first_open_place(lines, text)

    def _try_escape(
        self, lines: list[LogicalLine], text: str, plain_lines: Sequence[str], escaped_text: str
    ) -> tuple[list[LogicalLine], str]:
        """Return `escaped_text` and its lines if it renders the same words, else the given lines and text."""
        blocks = self._parse_blocks(escaped_text)
        if len(blocks) == 1 and _plain_lines(escaped_lines := render_block(blocks[0].tokens)) == plain_lines:
            return escaped_lines, escaped_text
        return lines, text

    def _paragraph_lines(self, text: str) -> list[str]:
        """Return the lines of a text that is a single paragraph; none for any other text."""
        blocks = self._parse_blocks(text)
        is_paragraph = len(blocks) == 1 and blocks[0].kind == PARAGRAPH and stable_prefix(text) == text
        return _plain_lines(render_block(blocks[0].tokens)) if is_paragraph else []

    def _unprinted_rows(self, lines: Sequence[LogicalLine], width: int) -> list[tuple[int, ScreenRow]]:
        """Return the rows that are not printed yet, each with the number of its logical line."""
        first, position = self._printed_place
        rows = []
        for number in range(first, len(lines)):
            rows += [(number, row) for row in lines[number].rows(position if number == first else 0, width)]
        return rows

    def _pending_rows(self, block: MarkdownBlock, lines: Sequence[LogicalLine], text: str, width: int) -> list[Text]:
        """Return the rows of the open block that may still change."""
        if len(text) < len(self._open):
            return self._preview_rows(width)
        was_in_block, gap = self._in_block, [*self._gap_before(block.kind)]
        self._in_block = was_in_block
        return [*gap, *(row.text for _, row in self._unprinted_rows(lines, width))]

    def _preview_rows(self, width: int) -> list[Text]:
        """Render all of the open text as it looks now, without recording it as printed."""
        rows: list[Text] = []
        saved_state = (self._last, self._in_block, self._printed_place, self._table)
        for block in self._parse_blocks(self._open):
            rows += self._take_block_rows(block, width)
        self._last, self._in_block, self._printed_place, self._table = saved_state
        return rows


def render_markdown(text: str, width: int) -> list[Text]:
    """Render a complete Markdown text as rows."""
    stream = MarkdownStream()
    stream.feed(text)
    return stream.take_remaining_rows(width)


def _first_open_place(lines: Sequence[LogicalLine], text: str) -> Place:
    """Return the place in the last paragraph, code or table from which on later text can change it."""
    numbers = [number for number, line in enumerate(lines) if line.group == lines[-1].group]
    if isinstance(lines[-1], TableRow) or text.endswith(MARKS):  # the next letter decides what the sign is
        return numbers[0], -1
    for number in numbers:
        line = lines[number]
        if isinstance(line, WrappedLine):
            mark = OPEN_MARKUP.search(line.shape)
            heading = line.shape.find("|") if number >= len(lines) - 2 else -1
            positions = [position for position in (mark.start() if mark else -1, heading) if position >= 0]
            if positions:
                return number, min(positions)
    return _end_place(lines)


def _end_place(lines: Sequence[LogicalLine]) -> Place:
    """Return the place at the end of the last line."""
    return len(lines) - 1, lines[-1].size


def _place_at(lines: Sequence[str], offset: int) -> Place:
    """Return the place that is `offset` characters after the beginning of the first line."""
    number = 0
    while offset > len(lines[number]):
        offset, number = offset - len(lines[number]) - 1, number + 1
    return number, offset


def _unmatched_signs(lines: Sequence[LogicalLine], text: str, end_place: Place) -> list[int]:
    """Return the positions in `text` of markup signs without effect so far, up to the place `end_place` of the lines.

    Signs that mean something are missing from the lines. So each character of the lines is searched for in the text, in
    order. A sign in the address of a link may be mistaken for another: the caller compares the words after escaping.
    """
    positions, position = [], -1
    for number, line in enumerate(lines[: end_place[0] + 1]):
        if not isinstance(line, WrappedLine):
            continue
        for column, letter in enumerate(line.text.plain[: end_place[1] if number == end_place[0] else None]):
            if letter.isspace():
                continue
            next_position = text.find(letter, position + 1)
            if next_position < 0:
                continue
            position = next_position
            if line.shape[column : column + 1] == letter and SIGN.match(letter):
                positions.append(position)
    return positions


def _plain_lines(lines: Sequence[LogicalLine]) -> list[str]:
    """Return the lines' text without styles."""
    return [line.text.plain for line in lines if isinstance(line, WrappedLine | VerbatimLine)]
