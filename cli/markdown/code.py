"""Syntax highlighting of code, line by line as the lines arrive."""

from __future__ import annotations

from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from rich.style import Style
from rich.text import Text

from cortexmlx.cli.markdown.styles import SYNTAX

MAX_LINE_LENGTH = 2000
"""Characters, at most, before a line that are read again with it."""
PROBE = "\n\nq\n"
"""Text that is read after a line. If its letter is in a string or a comment, the line has left one open."""


class Highlighter:
    """A syntax highlighter that takes code line by line and never changes its text.

    Each line is read with those before it, back to an empty line outside of strings and comments. So the work for a
    line does not grow with the code.
    """

    def __init__(self, language: str) -> None:
        self._lexer = _find_lexer(language)
        self._preceding_code = ""
        self._inside = False

    def highlight_line(self, text: str) -> Text:
        """Return the next line of the code in colours."""
        if self._lexer is None:
            return Text(text)
        if not text.strip():
            self._preceding_code = self._preceding_code + "\n" if self._inside else ""
            return Text(text)
        coloured_text, begin, end = Text(), len(self._preceding_code), len(self._preceding_code) + len(text)
        kind: tuple[str, ...] = ()
        for index, kind, value in self._lexer.get_tokens_unprocessed(self._preceding_code + text + PROBE):
            if index < end and index + len(value) > begin:
                coloured_text.append(value[max(begin - index, 0) : end - index], token_style(kind))
            if index + len(value) > end + 2:
                break
        self._inside = kind[:1] == ("Comment",) or kind[:2] == ("Literal", "String")
        self._preceding_code = ("" if end > MAX_LINE_LENGTH else self._preceding_code) + text + "\n"
        return coloured_text if coloured_text.plain == text else Text(text)


@lru_cache(maxsize=256)
def token_style(kind: tuple[str, ...]) -> Style | str:
    """Return the style of a kind of source code token, or of its nearest parent kind that has one."""
    for length in range(len(kind), 0, -1):
        if (style := SYNTAX.get(".".join(kind[:length]))) is not None:
            return style
    return ""


@lru_cache(maxsize=32)
def _find_lexer(language: str) -> Lexer | None:
    """Return the Pygments lexer of a language, or None."""
    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None
