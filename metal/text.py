"""Minifies a kernel's Metal text before it is sent to MLX. Without mlx.

MLX copies a kernel's whole text at every call, and hashes it at every launch. So the files in `shaders/` are written
for people, and what is sent of them is short.
"""

from __future__ import annotations

import re
from functools import cache

_KEPT = (
    r'(?<![\w.])(?:u8|[uUL])?R"(?P<raw>[^()\\\s]*)\(.*?\)(?P=raw)"'  # a raw literal
    r'|"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'"
    r"|(?<![\w.])\.?\d(?:[eEpP][+-]|'?[\w.])*"  # the ' in a number opens no literal
)
_COMMENTS = re.compile(rf"(?P<kept>{_KEPT})|//(?:\\\n|[^\n])*|/\*.*?\*/", re.S)
_SPACES = re.compile(
    rf"(?P<kept>{_KEPT})"
    r"|(?P<before>[ \t]*)\\[ \t]*\n(?P<after>[ \t]*)"  # a line that goes on in the next one
    r"|(?P<line>[ \t]*\n[ \t]*)"
    r"|[ \t]+",
    re.S,
)


@cache
def minify(text: str) -> str:
    """Return Metal text without comments, indentation and trailing spaces. Line n of the result is line n of the text,
    so a compiler's line numbers are those of the readable text.

    The result has the same tokens. Literals stay as they are, and so do the lines of macros.
    """
    return _SPACES.sub(_strip_indentation, _COMMENTS.sub(_strip_comment, text)).strip(" \t")


def _strip_comment(match: re.Match[str]) -> str:
    """Return the replacement of a comment: a space and its line breaks. A literal is returned as it is."""
    if match["kept"] is not None:
        return match.group()
    # A directive goes on behind a comment of several lines, so its line breaks become continued lines.
    breaks, comment = match.group().count("\n"), match.group()
    return " " + breaks * ("\n" if comment.startswith("//") else "\\\n")


def _strip_indentation(match: re.Match[str]) -> str:
    """Return the replacement of white space: one space or line break. A literal is returned as it is."""
    if match["kept"] is not None:
        return match.group()
    if match["line"] is not None:
        return "\n"
    if match["before"] is not None:
        return " \\\n" if match["before"] or match["after"] else "\\\n"
    return " "
