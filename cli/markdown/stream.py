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
        self._left = PARSE_BURST

    def earn(self, characters: int) -> None:
        """Add budget for new characters of the answer."""
        self._left += PARSE_RATE * characters

    def spend(self, characters: int) -> None:
        """Subtract characters that the parser reads."""
        self._left -= characters

    def allows(self, characters: int = 0) -> bool:
        """Return whether more than `characters` of the budget are left."""
        return self._left > characters


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
"""The number of a flow in its block, and a place in that flow."""


class OpenFence:
    """A fenced code block that is still being written. Its lines need no Markdown parser."""

    def __init__(self, opening: str, markup: str, info: str) -> None:
        self._indent = len(opening) - len(opening.lstrip(" "))
        self._closing = re.compile(rf" {{0,3}}{re.escape(markup[0])}{{{len(markup)},}}[ \t]*$")
        self._colours = Highlighter((info.split() or [""])[0])

    def is_closed_by(self, line: str) -> bool:
        """Return whether the code ends at this line."""
        return self._closing.match(line) is not None

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
        self._begun = False
        self._printed: Place = (0, 0)
        self._table: PrintedTable | None = None
        self._long = LONG_PARAGRAPH
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
        return self._last is not None or self._begun

    def take_final_rows(self, width: int, room: int) -> list[Text]:
        """Return the rows that have become final since the last call, `width` cells wide.

        If more than `room` rows are pending, the first of them become final as they look now. Columns of a table keep
        their widths, and signs of emphasis without an end stay signs. If the parser's budget is used up, nothing
        becomes final, and new text is pending as it was written.
        """
        if self._fence is None and not self._budget.allows():
            begin = max(self._read, len(self._open) - width * min(room, MAX_ROWS))
            new = self._open[begin:].split("\n")
            rows = [Text(line[a:b]) for line in new for a, b, _ in wrap_words(line, 0, width)]
            self.pending = [*self._last_pending, *rows]
            return []
        out = self._take_final_rows(width, room)
        self._read, self._last_pending = len(self._open), self.pending
        return out

    def _take_final_rows(self, width: int, room: int) -> list[Text]:
        """Parse the open text and return the rows that have become final; the others become `pending`."""
        out: list[Text] = []
        while True:
            if self._fence is not None:
                out += self._take_code_rows(self._fence)
                if self._fence is not None:
                    begun, gap = self._begun, [*self._gap_before(FENCE)]
                    self.pending = [*gap, *self._unfinished_code_rows(self._fence, width, room)]
                    self._begun = begun
                    return out
            text = stable_prefix(self._open)
            if len(text) > self._long:  # open signs at its end must not hold back all of it
                text = text.rstrip("".join(MARKS))
            found = self._parse_blocks(text)
            for block in found[:-1]:
                out += self._take_block_rows(block, width)
            if len(found) > 1:
                done = lines_length(self._open, found[-1].begin)
                self._open, text = self._open[done:], text[done:]
                found = self._parse_blocks(text)
            if not (found and self._enter_fence(found[-1])):
                break
        if found:
            out += self._take_open_block_rows(found[-1], text, width, room)
        else:
            self.pending = self._preview_rows(width)
        return out

    def take_remaining_rows(self, width: int) -> list[Text]:
        """Return the remaining rows when the answer has ended."""
        if self._open and not self._open.endswith("\n"):
            self._open += "\n"
        out = self._take_final_rows(width, room=10**9)
        for block in parse_blocks(self._open) if self._fence is None else ():
            out += self._take_block_rows(block, width)
        self._open, self.pending, self._fence = "", [], None
        return out

    def _enter_fence(self, block: MarkdownBlock) -> bool:
        """Enter a fenced code block if the last block begins one; return whether it does."""
        token = block.tokens[0]
        if block.kind != FENCE:
            return False
        begin = lines_length(self._open, block.begin)
        opening, newline, after = self._open[begin:].partition("\n")
        if not newline:
            return False
        self._fence, self._open = OpenFence(opening, token.markup, token.info), after
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

    def _unfinished_code_rows(self, fence: OpenFence, width: int, room: int) -> list[Text]:
        """Return the unfinished line of code, or only the end of a very long one."""
        if not self._open:
            return []
        line = fence.unindent_line(self._open)
        return [Text(line[max(len(line) // width - min(room, MAX_ROWS), 0) * width :])]

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
        self._last = kind if self._begun else self._last
        self._begun, self._printed, self._table, self._long = False, (0, 0), None, LONG_PARAGRAPH

    def _gap_before(self, kind: str) -> Iterator[Text]:
        """Yield the empty line before a block; none at the start, between items, and after a block's first row."""
        if not self._begun and self._last is not None and not kind == self._last == ITEM:
            yield Text()
        self._begun = True

    def _take_open_block_rows(self, block: MarkdownBlock, text: str, width: int, room: int) -> Iterator[Text]:
        """Yield the rows of the open block that cannot change any more."""
        lines = render_block(block.tokens, self._table)
        if lines:
            yield from self._take_rows_before(block, lines, _first_open_place(lines, text), width)
        self.pending = self._pending_rows(block, lines, text, width)
        if len(self.pending) > room and not text.endswith(MARKS) and (rows := self._unprinted_rows(lines, width)):
            number, row = rows[min(len(self.pending) - room, len(rows) - 1)]
            lines, text, mark = self._finalize_until(block, lines, text, (number, row.end))
            yield from self._take_rows_before(block, lines, min(mark, (number, row.end)), width)
            if block.kind == TABLE and self._table is not None and self._printed[0] > 1:
                lines, text = self._drop_printed_rows(self._table, block, lines, text)
            self.pending = self._pending_rows(block, lines, text, width)
        if block.kind == PARAGRAPH and len(text) > self._long:
            self._open = self._open[self._find_forget_point(lines, text) :]

    def _find_forget_point(self, lines: Sequence[LogicalLine], text: str) -> int:
        """Return how many characters of a long paragraph to forget, and set `_printed` to the same place in the rest.

        Only printed characters are forgotten, and only if the rest still has the same words. So the work for a word
        does not grow with the paragraph.
        """
        number, place = self._printed
        whole = _plain_lines(lines)
        printed = len("\n".join([*whole[:number], ""])) + place
        joined = "\n".join(whole)
        for cut in [*LETTER.finditer(text, LONG_PARAGRAPH // 2, lines_length(text, number) + place)][
            : -SPLIT_TRIES - 1 : -1
        ]:
            before, after = (
                "\n".join(self._paragraph_lines(text[: cut.start()])),
                self._paragraph_lines(text[cut.start() :]),
            )
            behind = len(joined) - len("\n".join(after))
            if (
                after
                and joined[:behind].rstrip() == before
                and joined[behind:] == "\n".join(after)
                and behind <= printed
            ):
                self._long, self._printed = LONG_PARAGRAPH, _place_at(after, printed - behind)
                return cut.start()
        self._long = len(text) + LONG_PARAGRAPH // 2
        return 0

    def _drop_printed_rows(
        self, table: PrintedTable, block: MarkdownBlock, lines: list[LogicalLine], text: str
    ) -> tuple[list[LogicalLine], str]:
        """Forget the printed rows of a table, so that the work for a row does not grow with the table."""
        gone, body = self._printed[0] - 1, block.begin + 2
        begin, end = lines_length(text, body), lines_length(text, body + gone)
        self._open = self._open[:begin] + self._open[end:]
        self._table, self._printed = PrintedTable(table.widths, table.dropped_rows + gone), (1, 0)
        return [lines[0], *lines[1 + gone :]], text[:begin] + text[end:]

    def _take_rows_before(
        self, block: MarkdownBlock, lines: Sequence[LogicalLine], mark: Place, width: int
    ) -> Iterator[Text]:
        """Yield the rows before `mark`. From there on, later text may change the last paragraph, code or table. The
        last row of words is held back, since more words may join it.
        """
        for (number, row), (following, after) in pairwise(self._unprinted_rows(lines, width)):
            words = isinstance(lines[number], WrappedLine)
            held = (following, after.end) > mark if words else number >= mark[0]
            if held and lines[number].group == lines[-1].group:
                return
            yield from self._gap_before(block.kind)
            yield row.text
            self._printed = (following, 0) if following != number else (number, row.end)

    def _finalize_until(
        self, block: MarkdownBlock, lines: list[LogicalLine], text: str, wanted: Place
    ) -> tuple[list[LogicalLine], str, Place]:
        """Make everything before `wanted` final: columns keep their widths, and emphasis signs without an end are
        escaped.

        Escaping changes the text. All such signs are escaped at once, since one parse for each would use up the budget
        on signs that have found their end.
        """
        if isinstance(lines[-1], TableRow):
            self._table = PrintedTable(lines[-1].widths, self._table.dropped_rows if self._table else 0)
            lines = render_block(block.tokens, self._table)
            return lines, text, _end_place(lines)
        before, behind = _plain_lines(lines), self._open[len(text) :]
        lines, text = self._try_escape(lines, text, before, _escape_signs(text, _unmatched_signs(lines, text, wanted)))
        whole = text
        for sign in [*SIGN.finditer(whole)][:MAX_SIGNS]:
            if _first_open_place(lines, text) >= wanted or not self._budget.allows():
                break
            at = sign.start() + len(text) - len(whole)
            lines, text = self._try_escape(lines, text, before, f"{text[:at]}\\{text[at:]}")
        self._open = text + behind
        return lines, text, _first_open_place(lines, text)

    def _try_escape(
        self, lines: list[LogicalLine], text: str, words: Sequence[str], escaped: str
    ) -> tuple[list[LogicalLine], str]:
        """Return the lines and text with more signs `escaped` if the words stay the same, else the given ones."""
        found = self._parse_blocks(escaped)
        if len(found) == 1 and _plain_lines(changed := render_block(found[0].tokens)) == words:
            return changed, escaped
        return lines, text

    def _paragraph_lines(self, text: str) -> list[str]:
        """Return the lines of a text that is a single paragraph; none for any other text."""
        found = self._parse_blocks(text)
        alone = len(found) == 1 and found[0].kind == PARAGRAPH and stable_prefix(text) == text
        return _plain_lines(render_block(found[0].tokens)) if alone else []

    def _unprinted_rows(self, lines: Sequence[LogicalLine], width: int) -> list[tuple[int, ScreenRow]]:
        """Return the rows that are not printed yet, each with the number of its logical line."""
        first, place = self._printed
        found = []
        for number in range(first, len(lines)):
            found += [(number, row) for row in lines[number].rows(place if number == first else 0, width)]
        return found

    def _pending_rows(self, block: MarkdownBlock, lines: Sequence[LogicalLine], text: str, width: int) -> list[Text]:
        """Return the rows of the open block that may still change."""
        if len(text) < len(self._open):
            return self._preview_rows(width)
        begun, gap = self._begun, [*self._gap_before(block.kind)]
        self._begun = begun
        return [*gap, *(row.text for _, row in self._unprinted_rows(lines, width))]

    def _preview_rows(self, width: int) -> list[Text]:
        """Render all of the open text as it looks now, without recording it as printed."""
        shown: list[Text] = []
        kept = (self._last, self._begun, self._printed, self._table)
        for block in self._parse_blocks(self._open):
            shown += self._take_block_rows(block, width)
        self._last, self._begun, self._printed, self._table = kept
        return shown


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
            places = [place for place in (mark.start() if mark else -1, heading) if place >= 0]
            if places:
                return number, min(places)
    return _end_place(lines)


def _end_place(lines: Sequence[LogicalLine]) -> Place:
    """Return the place at the end of the last line."""
    return len(lines) - 1, lines[-1].size


def _place_at(lines: Sequence[str], at: int) -> Place:
    """Return the place that is `at` characters after the beginning of the first line."""
    number = 0
    while at > len(lines[number]):
        at, number = at - len(lines[number]) - 1, number + 1
    return number, at


def _unmatched_signs(lines: Sequence[LogicalLine], text: str, wanted: Place) -> list[int]:
    """Return the positions in `text` of markup signs without effect so far, up to the place `wanted` of the lines.

    Signs that mean something are missing from the lines. So each character of the lines is searched for in the text, in
    order. A sign in the address of a link may be mistaken for another: the caller compares the words after escaping.
    """
    found, at = [], -1
    for number, line in enumerate(lines[: wanted[0] + 1]):
        if not isinstance(line, WrappedLine):
            continue
        for place, letter in enumerate(line.text.plain[: wanted[1] if number == wanted[0] else None]):
            if letter.isspace():
                continue
            following = text.find(letter, at + 1)
            if following < 0:
                continue
            at = following
            if line.shape[place : place + 1] == letter and SIGN.match(letter):
                found.append(at)
    return found


def _escape_signs(text: str, signs: Sequence[int]) -> str:
    """Return the text with a backslash before the sign at each of these positions."""
    places = [0, *signs, len(text)]
    return "\\".join(text[begin:end] for begin, end in pairwise(places))


def _plain_lines(lines: Sequence[LogicalLine]) -> list[str]:
    """Return the lines' text without styles."""
    return [line.text.plain for line in lines if isinstance(line, WrappedLine | VerbatimLine)]
