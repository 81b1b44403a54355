"""Markdown that is printed while it is being written: append-only, every line exactly once.

The text since the last finished block is parsed whenever it has grown. A block that no later text can change is
rendered and forgotten, so the work per piece of text does not grow with the answer. Of the open block those rendered
lines come out that later text cannot change either: a paragraph's earlier lines, the code before the last line of a
fence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, ListItem, Markdown
from rich.segment import Segment

Line = list[Segment]

PROBE = ".\n"
"""A line that continues an open paragraph, quote, table or fence, and begins a paragraph after anything else."""
CODE = ("fence", "code_block")
FRAMED = (*CODE, "hr", "heading_open", "table_open")
"""What shows a quote or a list item only when it has ended: their frames move while they grow."""
RESUMED = ("list_item_open", "code_block", "blockquote_open")
"""Blocks that a line which begins as they do can still continue: an indented one, even after an empty one, or one with
the quote's sign after a rule, a fence or a heading in it."""
ANEW = re.compile(r"[^\s>*+\-\d]|\*\*[^\s*]")
"""The beginning of a line that does not continue any of them, whatever follows."""
STREAMED = ("paragraph_open", "list_item_open", "blockquote_open", *CODE)
"""Blocks whose first lines may be shown before they end; a table's columns depend on its last row."""
OPEN_INLINE = re.compile(r"[`\[~\\&<|]|\*(?! )|(?<! )\*|(?<!\w)_|_(?!\w)")
"""What may still turn into emphasis, code, a link or a table once more text is there."""
MARKS = ("*", "_", "~", "`")
"""Signs of inline markup: how many there are in a row decides what they mean."""


@cache
def parser() -> MarkdownIt:
    """The dialect: what chat models write. No HTML and no link definitions (both would make text disappear), and no
    underlined headings (they would change a line that has been printed)."""
    return (
        MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(["lheading", "reference"])
    )


class LeftHeading(Heading):
    """A heading that starts where the text starts."""

    LEVEL_ALIGN = {}  # noqa: RUF012


class StableItem(ListItem):
    """A list item whose number takes the same room whatever the other numbers are."""

    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        """As rich does, with room for two digits."""
        return super().render_number(console, options, number, max(number, 10))


class Rendered(Markdown):
    """rich's Markdown over a list of tokens. A line that the model ended ends: it may be a line of a poem."""

    elements = {**Markdown.elements, "heading_open": LeftHeading, "list_item_open": StableItem}  # noqa: RUF012

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = tokens
        for inline in tokens:
            for token in inline.children or ():
                if token.type == "softbreak":
                    token.type = "hardbreak"


@dataclass(frozen=True)
class Block:
    """A top-level block, or one item of a top-level list: source lines `begin` up to `end`."""

    kind: str
    tokens: tuple[Token, ...]
    begin: int
    end: int


def blocks(text: str) -> list[Block]:
    """The top-level blocks of `text`, each item of a list by itself."""
    found: list[Block] = []
    start = 0
    tokens = parser().parse(text)
    around: list[Token] = []
    for index, token in enumerate(tokens):
        opens_list = token.level == 0 and token.type in ("bullet_list_open", "ordered_list_open")
        if opens_list:
            around, start = [token], index + 1
        elif token.level == 0 and token.type in ("bullet_list_close", "ordered_list_close"):
            around, start = [], index + 1
        elif token.level == (1 if around else 0) and token.nesting <= 0:
            found.append(_block(tokens[start : index + 1], around))
            start = index + 1
    return found


def _block(tokens: Sequence[Token], around: Sequence[Token]) -> Block:
    first = tokens[0]
    begin, end = first.map or (0, 0)
    if not around:
        return Block(first.type, tuple(tokens), begin, end)
    opening = Token(around[0].type, around[0].tag, 1, attrs=dict(around[0].attrs))
    if opening.type == "ordered_list_open" and first.info:
        opening.attrs["start"] = int(first.info)
    closing = Token(opening.type.replace("_open", "_close"), opening.tag, -1)
    return Block(first.type, (opening, *tokens, closing), begin, end)


class MarkdownStream:
    """Text in, finished lines out. `width` is fixed for the answer.

    Lines are lists of rich segments, without line ends.
    """

    def __init__(self, console: Console, width: int) -> None:
        self._console = console
        self._options = console.options.update(width=width, height=None)
        self._open = ""
        self._shown = 0
        self._last: str | None = None
        self._unfinished = ""

    def feed(self, text: str) -> None:
        """More of the answer."""
        self._open += text

    @property
    def begun(self) -> bool:
        """Whether any line has come out."""
        return self._last is not None or self._shown > 0

    @property
    def unfinished(self) -> str:
        """The line that is being written, as far as it has come, for a preview."""
        return self._unfinished

    def lines(self) -> Iterator[Line]:
        """The lines that have become final since the last call."""
        complete = self._open[: self._open.rfind("\n") + 1]
        if complete:
            *closed, last = blocks(complete + PROBE)
            probed = last.begin == complete.count("\n")
            if closed and closed[-1].kind in RESUMED and probed and not ANEW.match(self._open[len(complete) :]):
                closed.pop()
            for block in closed:
                yield from self._finish(block)
            if closed:
                self._open = "".join(self._open.splitlines(keepends=True)[closed[-1].end :]).lstrip("\n")
        yield from self._advance()

    def rest(self) -> Iterator[Line]:
        """The lines that are left when the answer has ended."""
        for block in blocks(self._open):
            yield from self._finish(block)
        self._open = ""

    def _finish(self, block: Block) -> Iterator[Line]:
        lines = self._render(block)
        if lines:
            yield from self._gap(block)
            yield from lines[self._shown :]
            self._last = block.kind
        self._shown = 0

    def _advance(self) -> Iterator[Line]:
        """The lines of the open block that cannot change any more."""
        source = self._open
        self._unfinished = source.rpartition("\n")[2]
        if source.endswith(MARKS):
            return  # the next letter decides what the sign is, and with it what lines before it look like
        found = blocks(source)
        if len(found) != 1 or found[0].kind not in STREAMED:
            return
        block = found[0]
        if block.kind not in CODE and any(t.type in FRAMED for t in block.tokens):
            return
        if block.kind in CODE:
            complete = blocks(source[: source.rfind("\n") + 1])
            stable = self._render(complete[0])[:-2] if complete else []
        else:
            rendered = self._render(block)
            stable = _settled(rendered)
            self._unfinished = _plain(rendered[-1]).strip() if rendered else ""
        if len(stable) > self._shown:
            yield from self._gap(block)
            yield from stable[self._shown :]
            self._shown = len(stable)

    def _gap(self, block: Block) -> Iterator[Line]:
        """The empty line before a block: none at the start, between items, or where the block has begun to appear."""
        between_items = block.kind == self._last == "list_item_open"
        if self._last is not None and not between_items and not self._shown:
            yield []

    def _render(self, block: Block) -> list[Line]:
        lines = self._console.render_lines(Rendered(list(block.tokens)), self._options, pad=False)
        if block.kind in CODE:  # framed by empty lines in the colour of its background
            return lines
        lines = [_stripped(line) for line in lines]
        filled = [number for number, line in enumerate(lines) if _plain(line).strip()]
        return lines[filled[0] : filled[-1] + 1] if filled else []


def _stripped(line: Line) -> Line:
    """The line without the spaces that fill it up to the width: they would be copied along."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], line[-1]._replace(text=line[-1].text.rstrip())] if line else []


def _settled(lines: list[Line]) -> list[Line]:
    """All lines but the last, which goes on, and but those from the line before an open piece of inline markup on: its
    signs may vanish, and the words after them move up."""
    first_open = next((n for n, line in enumerate(lines) if OPEN_INLINE.search(_plain(line))), len(lines))
    return lines[: max(min(len(lines), first_open) - 1, 0)]


def _plain(line: Line) -> str:
    return "".join(segment.text for segment in line)
