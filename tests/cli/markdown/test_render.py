"""What the tokens of a block look like: words, marks and styles."""

from __future__ import annotations

import pytest

from cortexmlx.cli.markdown import styles
from cortexmlx.cli.markdown.blocks import parse_blocks, parser
from cortexmlx.cli.markdown.render import render_block, render_inline


def shown(text: str, width: int = 40) -> list[str]:
    (block,) = parse_blocks(text)
    return [row.text.plain for flow in render_block(block.tokens) for row in flow.rows(0, width)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("# A *title*", ["A title"]),
        ("one\ntwo  \nthree", ["one", "two", "three"]),
        ("7) seven\n   and\n   - a\n   - b\n     1. c", ["7) seven", "   and", "   • a", "   • b", "     1. c"]),
        ("- one\n\n  two", ["• one", "", "  two"]),
        ("- - a\n  - b", ["• • a", "  • b"]),
        ("-\n", ["•"]),
        ("> one\n>\n> two\n> > three", ["▌ one", "▌", "▌ two", "▌", "▌ ▌ three"]),
        ("- ```\n  x = 1\n  ```", ["•", "x = 1"]),
        ("> | a | b |\n> |---|---|\n> | 1 | 2 |", ["a │ b", "──┼──", "1 │ 2"]),
        ("    indented\n\n    code", ["indented", "", "code"]),
    ],
)
def test_blocks(text: str, lines: list[str]) -> None:
    assert shown(text) == lines


@pytest.mark.parametrize(
    ("text", "plain", "style"),
    [
        ("**a**", "a", styles.STRONG),
        ("*a*", "a", styles.EMPHASIS),
        ("~~a~~", "a", styles.STRUCK),
        ("`a`", "a", styles.CODE),
        ("[a](b.org)", "a (b.org)", styles.LINK),
        ("![a](b.png)", "a (b.png)", styles.LINK),
        ("<https://b.org/a%20b>", "https://b.org/a%20b", styles.LINK),
        ("***a***", "a", styles.STRONG + styles.EMPHASIS),
    ],
)
def test_markup_inside_a_line(text: str, plain: str, style: object) -> None:
    (token,) = [token for token in parser().parse(text) if token.type == "inline"]
    (line,) = render_inline(token.children or [])
    assert line.text.plain == plain and line.text.spans[0].style == style


def test_the_shape_hides_what_is_no_markup() -> None:
    (token,) = [t for t in parser().parse(r"`a*b` \* [x](y_z) and *" + " w") if t.type == "inline"]
    (line,) = render_inline(token.children or [])
    assert line.text.plain == "a*b * x (y_z) and * w" and line.shape == "xxx x xxxxxxx and * w".replace("x x", "x x", 1)
    assert len(line.shape) == len(line.text.plain)
