"""Parse Markdown into top-level blocks, and find the part of an unfinished text whose blocks are certain."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.parser_block import RuleFuncBlockType
from markdown_it.parser_inline import RuleFuncInlineType
from markdown_it.rules_block import blockquote, list_block
from markdown_it.rules_block.table import escapedSplit
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import image, link
from markdown_it.token import Token

_BEGUN = re.compile(
    r"""\s*
    (?: [-+*]\s+ | \d{1,9}[.)]\s+ | >\s? | \#{1,6}\s+ )*       # items, quotes and headings that have begun
    (?: [^\s\d*_+\-#>`~|=:]                                    # a letter, or a sign without a meaning here
      | \*{1,3}[^\s*] | _{1,3}[^\s_] | `{1,2}[^`] | ~{1,2}[^~] # markup inside a line: no rule, no fence
      | \d+[^\d.)] | \d+[.)][^\s]                              # a number, not an item's
      | [-+][^\s\-+:|] | \#{1,6}[^\s\#] )""",
    re.VERBOSE,
)
"""The beginning of a line that decides its block, whatever follows."""


class ChatMarkdown(MarkdownIt):
    """A markdown-it parser that shows link addresses as they were written."""

    def normalizeLink(self, url: str) -> str:
        """Return the address without encoding it."""
        return url

    def normalizeLinkText(self, link: str) -> str:
        """Return the address without decoding it."""
        return link


MAX_NESTING = 40
"""Levels of nesting: a quote counts one, a list two. Signs of deeper levels are text; the parser would leave it all
out.
"""


def _limit_nesting(rule: RuleFuncBlockType) -> RuleFuncBlockType:
    """Return a block rule that applies only down to the deepest allowed nesting level."""
    return lambda state, begin, end, silent: state.level < MAX_NESTING and rule(state, begin, end, silent)


@lru_cache(maxsize=8)
def _last_link_end(text: str) -> int:
    """Return the position of the last `](` that a `)` follows; -1 if there is none."""
    return text.rfind("](", 0, max(text.rfind(")"), 0))


def _limit_to_last_link(rule: RuleFuncInlineType) -> RuleFuncInlineType:
    """Return a link rule that stops at the last link end. Else each of a thousand `[` would read all text after it."""
    return lambda state, silent: state.pos < _last_link_end(state.src) and rule(state, silent)


def _keep_surplus_cells(state: StateCore) -> None:
    """Append a row's cells beyond the table's last column (a | in code makes some) to the row's last cell. The parser
    would drop them.
    """
    lines = state.src.split("\n")
    row, cells = "", list[Token]()
    for previous_token, token in pairwise(state.tokens):
        if token.type == "tr_open" and token.map:
            row, cells = lines[token.map[0]], []
        elif previous_token.type == "td_open":
            cells.append(token)
        elif token.type == "tr_close" and cells:
            source_cells = [cell.strip() for cell in escapedSplit(row.strip())]
            cell_texts = [cell.content for cell in cells]
            for offset in (0, 1):  # a | or the mark of a quote may stand before the first
                part = source_cells[offset : offset + len(cell_texts)]
                if part[1:] == cell_texts[1:] and part and part[0].endswith(cell_texts[0]) and (offset or part[0]):
                    surplus_cells = source_cells[offset + len(cell_texts) :]
                    cells[-1].content = " | ".join(
                        [cell_texts[-1], *(surplus_cells if any(surplus_cells) else ())]
                    ).removesuffix(" | ")
                    break


@cache
def parser() -> MarkdownIt:
    """Return the parser of the Markdown that chat models write.

    HTML and link definitions are off, since both would make text disappear. Underlined headings are off, since they
    would change a line that is printed already. A character after a backslash is a token of its own.
    """
    dialect = ChatMarkdown("commonmark", {"html": False, "maxNesting": 100}).enable(["table", "strikethrough"])
    interrupted_rules = [
        "paragraph",
        "reference",
        "blockquote",
    ]  # what these rules may interrupt, as in markdown-it's own table
    dialect.block.ruler.at("blockquote", _limit_nesting(blockquote), {"alt": [*interrupted_rules, "list"]})
    dialect.block.ruler.at("list", _limit_nesting(list_block), {"alt": interrupted_rules})
    dialect.inline.ruler.at("link", _limit_to_last_link(link))
    dialect.inline.ruler.at("image", _limit_to_last_link(image))
    dialect.core.ruler.after("block", "surplus", _keep_surplus_cells)
    return dialect.disable(["lheading", "reference", "text_join"])


@dataclass(frozen=True)
class MarkdownBlock:
    """A top-level block of a Markdown text, or one item of a top-level list, from source line `begin` up to `end`."""

    kind: str
    tokens: tuple[Token, ...]
    begin: int
    end: int


def parse_blocks(text: str) -> list[MarkdownBlock]:
    """Parse `text` into its top-level blocks. Each item of a list is a block."""
    blocks: list[MarkdownBlock] = []
    start, level = 0, 0
    tokens = parser().parse(text)
    for index, token in enumerate(tokens):
        if token.level == 0 and token.type in ("bullet_list_open", "ordered_list_open"):
            level, start = 1, index + 1
        elif token.level == 0 and token.type in ("bullet_list_close", "ordered_list_close"):
            level, start = 0, index + 1
        elif token.level == level and token.nesting <= 0:
            begin, end = tokens[start].map or (0, 0)
            blocks.append(MarkdownBlock(tokens[start].type, tuple(tokens[start : index + 1]), begin, end))
            start = index + 1
    return blocks


def stable_prefix(text: str) -> str:
    """Return `text`, without its last line if that could still begin several kinds of blocks."""
    last = text.rfind("\n") + 1
    return text if last == len(text) or _BEGUN.match(text, last) else text[:last]


def lines_length(text: str, count: int) -> int:
    """Return the length in characters of the first `count` lines."""
    position = 0
    for _ in range(count):
        position = text.index("\n", position) + 1
    return position
