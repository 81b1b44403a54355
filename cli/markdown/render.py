"""Render the tokens of a Markdown block as the logical lines that a terminal shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from markdown_it.token import Token
from rich.style import Style
from rich.text import Text

from cortexmlx.cli.markdown import styles
from cortexmlx.cli.markdown.code import Highlighter
from cortexmlx.cli.markdown.flows import LogicalLine, VerbatimLine, WrappedLine
from cortexmlx.cli.markdown.table import PrintedTable, TableRow

RULE = "─" * 24
STYLES = {"strong_open": styles.STRONG, "em_open": styles.EMPHASIS, "s_open": styles.STRUCK, "link_open": styles.LINK}

OPEN_MARKUP = re.compile(r"`|\[(?![^\[\]]*\][^(])|~(?=~|$)|\\$|&(?=#?\w{0,31}$)|<(?=[^\s<>]*$)|\*(?=\S)|(?<!\w)_(?=\S)")
"""Signs that may still become emphasis, code, a link or a character when more text arrives."""
TIGHTER_MARKUP = "`[<"
"""The first signs of markup in which emphasis cannot end."""


@dataclass
class InlineLine:
    """A line of a paragraph under construction: its text, and which characters may be markup."""

    text: Text = field(default_factory=Text)
    shape: str = ""
    """The text, with a letter in place of each character that cannot be markup: in code, after a backslash, in an
    address.
    """

    def append(self, text: str, style: Style, *, signs: bool = False) -> None:
        """Append `text`. `signs`: its characters may be markup."""
        self.text.append(text, style)
        self.shape += text if signs else "x" * len(text)


def render_block(tokens: Sequence[Token], table: PrintedTable | None = None) -> list[LogicalLine]:
    """Return a block as logical lines. `table` says which rows of its last table are printed already."""
    return _BlockRenderer(table).render(tokens)


@dataclass
class _BlockRenderer:
    """Renders the tokens of one block as logical lines."""

    printed_table: PrintedTable | None
    lines: list[LogicalLine] = field(default_factory=list)
    prefixes: list[tuple[Text, Text]] = field(default_factory=list)
    """The prefixes of the open items and quotes: each for the first row and for those that follow."""
    is_item_start: bool = True
    """Whether the next block begins its item, so that no empty line comes before it."""
    group: int = 0
    heading: Style | None = None

    def render(self, tokens: Sequence[Token]) -> list[LogicalLine]:
        index = 0
        while index < len(tokens):
            token = tokens[index]
            if token.type == "table_open":
                close = next(n for n in range(index, len(tokens)) if tokens[n].type == "table_close")
                self._separate_block(token)
                self._add_table(tokens[index : close + 1], last=all(t.nesting < 0 for t in tokens[close:]))
                index = close
            else:
                self._render_token(token)
            index += 1
        return self.lines

    def _render_token(self, token: Token) -> None:
        """Render one token: open or close a list item or quote, or add its text."""
        match token.type:
            case "list_item_open":
                mark = f"{token.info}{token.markup} " if token.info else "• "
                self.prefixes.append((Text(mark, styles.MARK), Text(" " * len(mark))))
                self.is_item_start = True
            case "blockquote_open":
                self._separate_block(token)
                self.prefixes.append((Text("▌ ", styles.MARK), Text("▌ ", styles.MARK)))
                self.is_item_start = True
            case "list_item_close" | "blockquote_close":
                if self.is_item_start:  # the item or quote is empty
                    self._add_line(Text())
                self.prefixes.pop()
                self.is_item_start = False
            case "paragraph_open" | "fence" | "code_block" | "hr":
                self._separate_block(token)
                self._add_leaf(token)
            case "heading_open":
                self._separate_block(token)
                self.heading = styles.TITLE if token.tag == "h1" else styles.HEADING
            case "heading_close":
                self.heading = None
            case "inline":
                for line in render_inline(token.children or []):
                    if self.heading is not None:
                        line.text.stylize(self.heading)
                    self._add_line(line.text, line.shape)

    def _add_leaf(self, token: Token) -> None:
        """Add a rule, or a block of code."""
        if token.type == "hr":
            self._add_line(Text(RULE, styles.FAINT))
        elif token.type != "paragraph_open":
            self._flush_item_mark()
            info_words = token.info.split() if token.type == "fence" else []
            colours = Highlighter(info_words[0] if info_words else "")
            lines = token.content.split("\n")
            self.lines += [
                VerbatimLine(self.group, colours.highlight_line(line))
                for line in lines[: -1 if not lines[-1] else None]
            ]

    def _flush_item_mark(self) -> None:
        """Put an item's mark on its own line if the item begins with code or a table, which start at the left edge."""
        if self.is_item_start and any(first.plain != rest.plain for first, rest in self.prefixes):
            self._add_line(Text())
        self.is_item_start = False

    def _separate_block(self, token: Token) -> None:
        """Add an empty line before a block that does not begin its item. A list follows its paragraph without one."""
        self.group += 1
        if self.lines and not self.is_item_start:
            self._add_line(Text())

    def _add_line(self, text: Text, shape: str = "") -> None:
        """Add a wrapped line with the prefixes of the open items and quotes."""
        first, rest = Text(), Text()
        for own_first, own_rest in self.prefixes:
            first, rest = first + (own_first if self.is_item_start else own_rest), rest + own_rest
        self.lines.append(WrappedLine(self.group, text, first, rest, shape))
        self.is_item_start = False
        self.prefixes = [(own_rest, own_rest) for _, own_rest in self.prefixes]

    def _add_table(self, tokens: Sequence[Token], *, last: bool) -> None:
        rows: list[tuple[Text, ...]] = []
        alignments: list[str] = []
        for number, token in enumerate(tokens):
            if token.type == "tr_open":
                rows.append(())
            elif token.type in ("th_open", "td_open"):
                cell = Text(" ").join(line.text for line in render_inline(tokens[number + 1].children or []))
                rows[-1] = (*rows[-1], cell)
                if token.type == "th_open":
                    alignments.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
        self._flush_item_mark()
        natural = tuple(max(row[n].cell_len for row in rows) for n in range(len(rows[0])))
        printed_table = self.printed_table if last else None
        widths, dropped_rows = (
            (natural, 0) if printed_table is None else (printed_table.widths, printed_table.dropped_rows)
        )
        for number, row in enumerate(rows):
            row_number = number + dropped_rows if number else 0
            self.lines.append(TableRow(self.group, row_number, row, rows[0], tuple(alignments), widths))


def render_inline(tokens: Sequence[Token]) -> list[InlineLine]:
    """Return the lines of a paragraph's text. Each line of the model stays a line, since the text may be a poem."""
    lines, open_styles, begins, targets = [InlineLine()], [Style()], list[int](), list[str]()
    outermost = (0, 0)
    for token in tokens:
        style = open_styles[-1]
        if token.type in ("softbreak", "hardbreak"):
            lines.append(InlineLine())
        elif token.type == "code_inline":
            lines[-1].append(token.content, style + styles.CODE)
        elif token.type == "image":
            lines[-1].append(f"{token.content} ({token.attrs.get('src', '')})", style + styles.LINK)
        elif token.nesting > 0:
            if len(open_styles) == 1:
                outermost = (len(lines) - 1, len(lines[-1].shape))
            open_styles.append(style + STYLES.get(token.type, Style()))
            if token.type == "link_open":
                begins.append(len(lines[-1].shape))
                targets.append(str(token.attrs.get("href", "")))
        elif token.nesting < 0:
            open_styles.pop()
            if len(open_styles) == 1:
                _keep_markup_open(lines, *outermost)
            if token.type == "link_close" and (target := targets.pop()) not in lines[-1].text.plain[begins.pop() :]:
                lines[-1].append(f" ({target})", open_styles[-1] + styles.FAINT)
        else:
            lines[-1].append(token.content, style, signs=token.type == "text")
    for line in lines[:-1]:
        line.text.rstrip()
    return lines


def _keep_markup_open(lines: Sequence[InlineLine], number: int, position: int) -> None:
    """Leave emphasis or a link unfinished if markup that binds tighter began within it and is still open.

    If that sign finds its end, there is no such emphasis or link. So its beginning, at `position` of line `number`,
    stays as open as the sign.
    """
    for line, start in ((line, position if line is lines[number] else 0) for line in lines[number:]):
        if any(mark[0] in TIGHTER_MARKUP for mark in OPEN_MARKUP.finditer(line.shape, start)):
            shape = lines[number].shape
            lines[number].shape = f"{shape[:position]}`{shape[position + 1 :]}"
            return
