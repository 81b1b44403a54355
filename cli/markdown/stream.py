"""Markdown that is printed while it is being written: append-only, every word exactly once, at any width.

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

from cortexmlx.cli.markdown.blocks import Block, blocks, certain, first_lines
from cortexmlx.cli.markdown.code import Highlighter
from cortexmlx.cli.markdown.flows import Flow, Prose, ScreenRow, Verbatim, wrapped
from cortexmlx.cli.markdown.render import OPEN_MARK, flows
from cortexmlx.cli.markdown.table import Printed, TableRow
from cortexmlx.cli.terminal.harmless import harmless

RATE = 64
"""Characters that the parser may read per character of the answer."""
BURST = 20_000
"""Characters that the parser may read in addition. An answer of usual length never uses them up."""


class Budget:
    """The number of characters that the parser may still read.

    One reading may overdraw the budget, and the next then waits for more text. So all readings of `n` characters of
    text are at most `RATE * n + BURST` and one reading.
    """

    def __init__(self) -> None:
        self._left = BURST

    def earn(self, characters: int) -> None:
        """Count new characters of the answer."""
        self._left += RATE * characters

    def spend(self, characters: int) -> None:
        """Count characters that the parser reads."""
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
MOST_SIGNS = 50
LONG = 2000
"""Characters of a paragraph above which its printed part is forgotten."""
TRIES = 3
"""The number of places at which such a paragraph may be split."""

MOST_ROWS = 50
"""Rows of pending text that are looked at, at most."""

Place = tuple[int, int]
"""The number of a flow in its block, and a place in that flow."""


class Fence:
    """An open top-level block of code. Its lines need no parser."""

    def __init__(self, opening: str, markup: str, info: str) -> None:
        self._indent = len(opening) - len(opening.lstrip(" "))
        self._closing = re.compile(rf" {{0,3}}{re.escape(markup[0])}{{{len(markup)},}}[ \t]*$")
        self._colours = Highlighter((info.split() or [""])[0])

    def closed_by(self, line: str) -> bool:
        """Return whether the code ends at this line."""
        return self._closing.match(line) is not None

    def plain(self, line: str) -> str:
        """Return the line of code without the indentation of the fence, with spaces for tabs."""
        blanks = len(line) - len(line.lstrip(" "))
        return line[min(blanks, self._indent) :].expandtabs(8)

    def coloured(self, line: str) -> Text:
        """Return the next line of code in colours."""
        return self._colours.line(self.plain(line))


class MarkdownStream:
    """A renderer that takes the text of an answer and returns rows of the screen."""

    def __init__(self) -> None:
        self.pending: list[Text] = []
        self._open = ""
        self._fence: Fence | None = None
        self._last: str | None = None
        self._begun = False
        self._printed: Place = (0, 0)
        self._table: Printed | None = None
        self._long = LONG
        self._budget = Budget()
        self._read = 0
        self._last_pending: list[Text] = []

    def feed(self, text: str) -> None:
        """Add text to the answer."""
        text = harmless(text)
        self._open += text
        self._budget.earn(len(text))

    @property
    def begun(self) -> bool:
        """Whether anything has been printed."""
        return self._last is not None or self._begun

    def settle(self, width: int, room: int) -> list[Text]:
        """Return the rows that have become final since the last call, `width` cells wide.

        If more than `room` rows are pending, the first of them become final as they look now. Columns of a table keep
        their widths, and signs of emphasis without an end stay signs. If the parser's budget is used up, nothing
        becomes final, and new text is pending as it was written.
        """
        if self._fence is None and not self._budget.allows():
            begin = max(self._read, len(self._open) - width * min(room, MOST_ROWS))
            new = self._open[begin:].split("\n")
            rows = [Text(line[a:b]) for line in new for a, b, _ in wrapped(line, 0, width)]
            self.pending = [*self._last_pending, *rows]
            return []
        out = self._settle(width, room)
        self._read, self._last_pending = len(self._open), self.pending
        return out

    def _settle(self, width: int, room: int) -> list[Text]:
        out: list[Text] = []
        while True:
            if self._fence is not None:
                out += self._code(self._fence)
                if self._fence is not None:
                    begun, gap = self._begun, [*self._gap(FENCE)]
                    self.pending = [*gap, *self._line_begun(self._fence, width, room)]
                    self._begun = begun
                    return out
            text = certain(self._open)
            if len(text) > self._long:  # open signs at its end must not hold back all of it
                text = text.rstrip("".join(MARKS))
            found = self._blocks(text)
            for block in found[:-1]:
                out += self._finish(block, width)
            if len(found) > 1:
                done = first_lines(self._open, found[-1].begin)
                self._open, text = self._open[done:], text[done:]
                found = self._blocks(text)
            if not (found and self._enters_fence(found[-1])):
                break
        if found:
            out += self._advance(found[-1], text, width, room)
        else:
            self.pending = self._preview(width)
        return out

    def rest(self, width: int) -> list[Text]:
        """Return the rows that are left when the answer has ended."""
        if self._open and not self._open.endswith("\n"):
            self._open += "\n"
        out = self._settle(width, room=10**9)
        for block in blocks(self._open) if self._fence is None else ():
            out += self._finish(block, width)
        self._open, self.pending, self._fence = "", [], None
        return out

    def _enters_fence(self, block: Block) -> bool:
        token = block.tokens[0]
        if block.kind != FENCE:
            return False
        begin = first_lines(self._open, block.begin)
        opening, newline, after = self._open[begin:].partition("\n")
        if not newline:
            return False
        self._fence, self._open = Fence(opening, token.markup, token.info), after
        return True

    def _code(self, fence: Fence) -> Iterator[Text]:
        *lines, _ = self._open.split("\n")
        for number, line in enumerate(lines):
            if fence.closed_by(line):
                self._open = self._open[first_lines(self._open, number + 1) :]
                self._fence = None
                self._end(FENCE)
                return
            yield from self._gap(FENCE)
            yield fence.coloured(line)
        self._open = self._open.rpartition("\n")[2]

    def _line_begun(self, fence: Fence, width: int, room: int) -> list[Text]:
        """Return the unfinished line of code, or only the end of a very long one."""
        if not self._open:
            return []
        line = fence.plain(self._open)
        return [Text(line[max(len(line) // width - min(room, MOST_ROWS), 0) * width :])]

    def _blocks(self, text: str) -> list[Block]:
        self._budget.spend(len(text))
        return blocks(text)

    def _finish(self, block: Block, width: int) -> Iterator[Text]:
        for _, row in self._rows(flows(block.tokens, self._table), width):
            yield from self._gap(block.kind)
            yield row.text
        self._end(block.kind)

    def _end(self, kind: str) -> None:
        """Note that a block is printed as a whole."""
        self._last = kind if self._begun else self._last
        self._begun, self._printed, self._table, self._long = False, (0, 0), None, LONG

    def _gap(self, kind: str) -> Iterator[Text]:
        """Yield the empty line before a block. There is no empty line at the start, between items, and after a block's
        first row.
        """
        if not self._begun and self._last is not None and not kind == self._last == ITEM:
            yield Text()
        self._begun = True

    def _advance(self, block: Block, text: str, width: int, room: int) -> Iterator[Text]:
        """Yield the rows of the open block that cannot change any more."""
        lines = flows(block.tokens, self._table)
        if lines:
            yield from self._settled(block, lines, _mark(lines, text), width)
        self.pending = self._left(block, lines, text, width)
        if len(self.pending) > room and not text.endswith(MARKS) and (rows := self._rows(lines, width)):
            number, row = rows[min(len(self.pending) - room, len(rows) - 1)]
            lines, text, mark = self._decide(block, lines, text, (number, row.end))
            yield from self._settled(block, lines, min(mark, (number, row.end)), width)
            if block.kind == TABLE and self._table is not None and self._printed[0] > 1:
                lines, text = self._without_printed(self._table, block, lines, text)
            self.pending = self._left(block, lines, text, width)
        if block.kind == PARAGRAPH and len(text) > self._long:
            self._open = self._open[self._printed_words(lines, text) :]

    def _printed_words(self, lines: Sequence[Flow], text: str) -> int:
        """Return how many characters of a long paragraph to forget, and set `_printed` to the same place in the rest.

        Only printed characters are forgotten, and only if the rest still has the same words. So the work for a word
        does not grow with the paragraph.
        """
        number, place = self._printed
        whole = _plain(lines)
        printed = len("\n".join([*whole[:number], ""])) + place
        joined = "\n".join(whole)
        for cut in [*LETTER.finditer(text, LONG // 2, first_lines(text, number) + place)][: -TRIES - 1 : -1]:
            before, after = "\n".join(self._words(text[: cut.start()])), self._words(text[cut.start() :])
            behind = len(joined) - len("\n".join(after))
            if (
                after
                and joined[:behind].rstrip() == before
                and joined[behind:] == "\n".join(after)
                and behind <= printed
            ):
                self._long, self._printed = LONG, _place(after, printed - behind)
                return cut.start()
        self._long = len(text) + LONG // 2
        return 0

    def _without_printed(self, table: Printed, block: Block, lines: list[Flow], text: str) -> tuple[list[Flow], str]:
        """Forget the printed rows of a table, so that the work for a row does not grow with the table."""
        gone, body = self._printed[0] - 1, block.begin + 2
        begin, end = first_lines(text, body), first_lines(text, body + gone)
        self._open = self._open[:begin] + self._open[end:]
        self._table, self._printed = Printed(table.widths, table.gone + gone), (1, 0)
        return [lines[0], *lines[1 + gone :]], text[:begin] + text[end:]

    def _settled(self, block: Block, lines: Sequence[Flow], mark: Place, width: int) -> Iterator[Text]:
        """Yield the rows before `mark`. From there on, later text may change the last paragraph, code or table. The
        last row of words is held back, since more words may join it.
        """
        for (number, row), (following, after) in pairwise(self._rows(lines, width)):
            words = isinstance(lines[number], Prose)
            held = (following, after.end) > mark if words else number >= mark[0]
            if held and lines[number].group == lines[-1].group:
                return
            yield from self._gap(block.kind)
            yield row.text
            self._printed = (following, 0) if following != number else (number, row.end)

    def _decide(self, block: Block, lines: list[Flow], text: str, wanted: Place) -> tuple[list[Flow], str, Place]:
        """Make everything before `wanted` final: columns keep their widths, and signs of emphasis without an end are
        escaped.

        Escaping changes the text. All such signs are escaped at once, since one parse for each would use up the budget
        on signs that have found their end.
        """
        if isinstance(lines[-1], TableRow):
            self._table = Printed(lines[-1].widths, self._table.gone if self._table else 0)
            lines = flows(block.tokens, self._table)
            return lines, text, _end_of(lines)
        before, behind = _plain(lines), self._open[len(text) :]
        lines, text = self._signs(lines, text, before, _escaped(text, _open_signs(lines, text, wanted)))
        whole = text
        for sign in [*SIGN.finditer(whole)][:MOST_SIGNS]:
            if _mark(lines, text) >= wanted or not self._budget.allows():
                break
            at = sign.start() + len(text) - len(whole)
            lines, text = self._signs(lines, text, before, f"{text[:at]}\\{text[at:]}")
        self._open = text + behind
        return lines, text, _mark(lines, text)

    def _signs(self, lines: list[Flow], text: str, words: Sequence[str], escaped: str) -> tuple[list[Flow], str]:
        """Return the lines and text with more signs `escaped` if the words stay the same, else the given ones."""
        found = self._blocks(escaped)
        if len(found) == 1 and _plain(changed := flows(found[0].tokens)) == words:
            return changed, escaped
        return lines, text

    def _words(self, text: str) -> list[str]:
        """Return the lines of a text that is one paragraph; none for any other text."""
        found = self._blocks(text)
        alone = len(found) == 1 and found[0].kind == PARAGRAPH and certain(text) == text
        return _plain(flows(found[0].tokens)) if alone else []

    def _rows(self, lines: Sequence[Flow], width: int) -> list[tuple[int, ScreenRow]]:
        """Return the rows that are not printed yet, each with the number of its flow."""
        first, place = self._printed
        found = []
        for number in range(first, len(lines)):
            found += [(number, row) for row in lines[number].rows(place if number == first else 0, width)]
        return found

    def _left(self, block: Block, lines: Sequence[Flow], text: str, width: int) -> list[Text]:
        if len(text) < len(self._open):
            return self._preview(width)
        begun, gap = self._begun, [*self._gap(block.kind)]
        self._begun = begun
        return [*gap, *(row.text for _, row in self._rows(lines, width))]

    def _preview(self, width: int) -> list[Text]:
        shown: list[Text] = []
        kept = (self._last, self._begun, self._printed, self._table)
        for block in self._blocks(self._open):
            shown += self._finish(block, width)
        self._last, self._begun, self._printed, self._table = kept
        return shown


def printed(text: str, width: int) -> list[Text]:
    """Return the rows of a whole text."""
    stream = MarkdownStream()
    stream.feed(text)
    return stream.rest(width)


def _mark(lines: Sequence[Flow], text: str) -> Place:
    """Return the place in the last paragraph, code or table from which on later text can change it."""
    numbers = [number for number, line in enumerate(lines) if line.group == lines[-1].group]
    if isinstance(lines[-1], TableRow) or text.endswith(MARKS):  # the next letter decides what the sign is
        return numbers[0], -1
    for number in numbers:
        line = lines[number]
        if isinstance(line, Prose):
            mark = OPEN_MARK.search(line.shape)
            heading = line.shape.find("|") if number >= len(lines) - 2 else -1
            places = [place for place in (mark.start() if mark else -1, heading) if place >= 0]
            if places:
                return number, min(places)
    return _end_of(lines)


def _end_of(lines: Sequence[Flow]) -> Place:
    return len(lines) - 1, lines[-1].size


def _place(lines: Sequence[str], at: int) -> Place:
    """Return the place `at` characters after the beginning of the first line."""
    number = 0
    while at > len(lines[number]):
        at, number = at - len(lines[number]) - 1, number + 1
    return number, at


def _open_signs(lines: Sequence[Flow], text: str, wanted: Place) -> list[int]:
    """Return the places in `text` of signs that mean nothing yet, up to the place `wanted` of the lines.

    Signs that mean something are missing from the lines. So each character of the lines is searched for in the text, in
    order. A sign in the address of a link may be mistaken for another: the caller compares the words after escaping.
    """
    found, at = [], -1
    for number, line in enumerate(lines[: wanted[0] + 1]):
        if not isinstance(line, Prose):
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


def _escaped(text: str, signs: Sequence[int]) -> str:
    """Return the text with a backslash before the sign at each of these places."""
    places = [0, *signs, len(text)]
    return "\\".join(text[begin:end] for begin, end in pairwise(places))


def _plain(lines: Sequence[Flow]) -> list[str]:
    return [line.text.plain for line in lines if isinstance(line, Prose | Verbatim)]
