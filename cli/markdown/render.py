"""Turn the tokens of a block into the lines that a terminal shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from markdown_it.token import Token
from rich.style import Style
from rich.text import Text

from cortexmlx.cli.markdown import styles
from cortexmlx.cli.markdown.code import Highlighter
from cortexmlx.cli.markdown.flows import Flow, Prose, Verbatim
from cortexmlx.cli.markdown.table import Printed, TableRow

RULE = "─" * 24
STYLES = {"strong_open": styles.STRONG, "em_open": styles.EMPHASIS, "s_open": styles.STRUCK, "link_open": styles.LINK}

OPEN_MARK = re.compile(r"`|\[(?![^\[\]]*\][^(])|~(?=~|$)|\\$|&(?=#?\w{0,31}$)|<(?=[^\s<>]*$)|\*(?=\S)|(?<!\w)_(?=\S)")
"""Signs that may still become emphasis, code, a link or a character when more text arrives."""
TIGHTER = "`[<"
"""The first signs of markup in which emphasis cannot end."""


@dataclass
class Line:
    """A line of a paragraph."""

    text: Text = field(default_factory=Text)
    shape: str = ""
    """The text, with a letter in place of each character that cannot be markup: in code, after a backslash, in an
    address.
    """

    def add(self, words: str, style: Style, *, signs: bool = False) -> None:
        """Append `words`. `signs` says whether they may be markup."""
        self.text.append(words, style)
        self.shape += words if signs else "x" * len(words)


def flows(tokens: Sequence[Token], table: Printed | None = None) -> list[Flow]:
    """Return the lines of a block. `table` says which rows of its last table are printed already."""
    return _Renderer(table).render(tokens)


@dataclass
class _Renderer:
    """One pass over the tokens of a block."""

    printed: Printed | None
    found: list[Flow] = field(default_factory=list)
    around: list[tuple[Text, Text]] = field(default_factory=list)
    """The prefixes of the open items and quotes: each for the first row and for those that follow."""
    fresh: bool = True
    """Whether the next block begins its item, so that no empty line comes before it."""
    group: int = 0
    heading: Style | None = None

    def render(self, tokens: Sequence[Token]) -> list[Flow]:
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if token.type == "table_open":
                close = next(n for n in range(at, len(tokens)) if tokens[n].type == "table_close")
                self._part(token)
                self._table(tokens[at : close + 1], last=all(t.nesting < 0 for t in tokens[close:]))
                at = close
            else:
                self._take(token)
            at += 1
        return self.found

    def _take(self, token: Token) -> None:
        match token.type:
            case "list_item_open":
                mark = f"{token.info}{token.markup} " if token.info else "• "
                self.around.append((Text(mark, styles.MARK), Text(" " * len(mark))))
                self.fresh = True
            case "blockquote_open":
                self._part(token)
                self.around.append((Text("▌ ", styles.MARK), Text("▌ ", styles.MARK)))
                self.fresh = True
            case "list_item_close" | "blockquote_close":
                if self.fresh:  # the item or quote is empty
                    self._add(Text())
                self.around.pop()
                self.fresh = False
            case "paragraph_open" | "fence" | "code_block" | "hr":
                self._part(token)
                self._whole(token)
            case "heading_open":
                self._part(token)
                self.heading = styles.TITLE if token.tag == "h1" else styles.HEADING
            case "heading_close":
                self.heading = None
            case "inline":
                for line in inline(token.children or []):
                    if self.heading is not None:
                        line.text.stylize(self.heading)
                    self._add(line.text, line.shape)

    def _whole(self, token: Token) -> None:
        if token.type == "hr":
            self._add(Text(RULE, styles.FAINT))
        elif token.type != "paragraph_open":
            self._mark_alone()
            words = token.info.split() if token.type == "fence" else []
            colours = Highlighter(words[0] if words else "")
            lines = token.content.split("\n")
            self.found += [Verbatim(self.group, colours.line(line)) for line in lines[: -1 if not lines[-1] else None]]

    def _mark_alone(self) -> None:
        """Give an item's mark a line of its own if the item begins with code or a table, which stand at the edge."""
        if self.fresh and any(first.plain != rest.plain for first, rest in self.around):
            self._add(Text())
        self.fresh = False

    def _part(self, token: Token) -> None:
        """Add an empty line before a block that does not begin its item. A list follows its paragraph at once."""
        self.group += 1
        if self.found and not self.fresh:
            self._add(Text())

    def _add(self, text: Text, shape: str = "") -> None:
        first, rest = Text(), Text()
        for own_first, own_rest in self.around:
            first, rest = first + (own_first if self.fresh else own_rest), rest + own_rest
        self.found.append(Prose(self.group, text, first, rest, shape))
        self.fresh = False
        self.around = [(own_rest, own_rest) for _, own_rest in self.around]

    def _table(self, tokens: Sequence[Token], *, last: bool) -> None:
        rows: list[tuple[Text, ...]] = []
        alignments: list[str] = []
        for number, token in enumerate(tokens):
            if token.type == "tr_open":
                rows.append(())
            elif token.type in ("th_open", "td_open"):
                cell = Text(" ").join(line.text for line in inline(tokens[number + 1].children or []))
                rows[-1] = (*rows[-1], cell)
                if token.type == "th_open":
                    alignments.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
        self._mark_alone()
        natural = tuple(max(row[n].cell_len for row in rows) for n in range(len(rows[0])))
        printed = self.printed if last else None
        widths, gone = (natural, 0) if printed is None else (printed.widths, printed.gone)
        for number, row in enumerate(rows):
            at = number + gone if number else 0
            self.found.append(TableRow(self.group, at, row, rows[0], tuple(alignments), widths))


def inline(tokens: Sequence[Token]) -> list[Line]:
    """Return the words of a paragraph. Each line of the model stays a line, since the text may be a poem."""
    lines, open_styles, begins, targets = [Line()], [Style()], list[int](), list[str]()
    outermost = (0, 0)
    for token in tokens:
        style = open_styles[-1]
        if token.type in ("softbreak", "hardbreak"):
            lines.append(Line())
        elif token.type == "code_inline":
            lines[-1].add(token.content, style + styles.CODE)
        elif token.type == "image":
            lines[-1].add(f"{token.content} ({token.attrs.get('src', '')})", style + styles.LINK)
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
                _hold(lines, *outermost)
            if token.type == "link_close" and (target := targets.pop()) not in lines[-1].text.plain[begins.pop() :]:
                lines[-1].add(f" ({target})", open_styles[-1] + styles.FAINT)
        else:
            lines[-1].add(token.content, style, signs=token.type == "text")
    for line in lines[:-1]:
        line.text.rstrip()
    return lines


def _hold(lines: Sequence[Line], number: int, begin: int) -> None:
    """Keep emphasis or a link open if it has ended after an open sign that binds tighter.

    If that sign finds its end, there is no such emphasis or link. So its beginning, at `begin` of line `number`, stays
    as open as the sign.
    """
    for line, at in ((line, begin if line is lines[number] else 0) for line in lines[number:]):
        if any(mark[0] in TIGHTER for mark in OPEN_MARK.finditer(line.shape, at)):
            shape = lines[number].shape
            lines[number].shape = f"{shape[:begin]}`{shape[begin + 1 :]}"
            return
