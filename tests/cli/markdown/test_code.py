"""Code keeps its characters, and its colours are those that it has when it is read as a whole."""

from __future__ import annotations

import pytest
from pygments.lexers import get_lexer_by_name

from cortexmlx.cli.markdown.code import MAX_LINE_LENGTH, Highlighter, token_style

PYTHON = '''\
import os

class Colour(Enum):
    """A docstring

    of more than one part.
    """
    @property
    def name(self) -> str:
        return f"{self!r}" + 'x' * 3  # a comment


if True: pass
'''


def coloured(language: str, code: str) -> list[list[tuple[str, str]]]:
    """The characters of each line, each with its style."""
    highlighter = Highlighter(language)
    lines = []
    for line in code.split("\n"):
        text = highlighter.highlight_line(line)
        assert text.plain == line
        styles = [""] * len(line)
        for span in text.spans:
            styles[span.start : span.end] = [str(span.style)] * (span.end - span.start)
        lines.append(list(zip(line, styles, strict=True)))
    return lines


@pytest.mark.parametrize(("language", "code"), [("python", PYTHON), ("c", "/* one\n\n two */ int x = 3;\nreturn x;\n")])
def test_lines_have_the_colours_of_the_whole(language: str, code: str) -> None:
    whole = [
        (letter, str(token_style(kind)))
        for _, kind, value in get_lexer_by_name(language).get_tokens_unprocessed(code)
        for letter in value
    ]
    shown = [cell for line in coloured(language, code) for cell in line]
    assert [c for c in shown if c[0] != " "] == [c for c in whole if not c[0].isspace()]


@pytest.mark.parametrize("language", ["", "no such language", "python", "html", "json", "console", "diff"])
def test_whatever_the_language_the_characters_stay(language: str) -> None:
    coloured(language, PYTHON + "\t<b> \\ 'open\n$ ls\n")


def test_the_work_for_a_line_does_not_grow() -> None:
    highlighter = Highlighter("python")
    for number in range(120):
        highlighter.highlight_line(f"x = {number} + y_{number}")
        assert len(highlighter._preceding_code) < MAX_LINE_LENGTH + 100
