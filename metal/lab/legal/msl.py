"""Metal text before any parsing: what MLX puts before it, comments, literals, brackets, lists.

Blanking moves nothing: line n, column m of the result is line n, column m of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

KERNEL_FOLDER = "mlx/backend/metal/kernels/"
"""The folder of MLX's own kernels, in its folder of headers."""

UTILS = KERNEL_FOLDER + "utils.h"
PREAMBLE = f'#include "{UTILS}"\n'
"""What MLX puts before the text of every kernel."""

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.M)
FUNCTION_CONSTANT = re.compile(
    r"\bconstant\s+(?P<type>[\w:]+)\s+(?P<name>\w+)\s*\[\[\s*function_constant\(\s*\d+\s*\)\s*\]\]\s*;"
)
PARAMETER = re.compile(r"(?P<type>.*?)(?P<name>\w+)\s*\[\[(?P<attribute>.*)\]\]", re.S)
"""A whole parameter of a kernel function."""

_BLANKED = re.compile(
    r"(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)"
    r'|(?P<literal>"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*')"
    r"|(?<![\w.])\.?\d(?:[eEpP][+-]|'?[\w.])*",  # the ' in a number opens no literal
    re.S,
)
_OPENING, _CLOSING = "([{", ")]}"


def _replace_by_spaces(text: str) -> str:
    """Replace everything but line breaks by spaces. Backslashes before line breaks stay, because macros need them."""
    return re.sub(r"\\(?!\n)|[^\\\n]", " ", text)


def blank_comments(text: str) -> str:
    """Replace comments by spaces. Line breaks and literals stay."""
    return _BLANKED.sub(lambda found: _replace_by_spaces(found.group()) if found["comment"] else found.group(), text)


def blank_non_code(text: str) -> str:
    """Replace comments and the inside of literals by spaces. Line breaks stay."""

    def blank_match(found: re.Match[str]) -> str:
        if literal := found["literal"]:
            return literal[0] + _replace_by_spaces(literal[1:-1]) + literal[0]
        return _replace_by_spaces(found.group()) if found["comment"] else found.group()

    return _BLANKED.sub(blank_match, text)


def find_closing_bracket(text: str, at: int) -> int | None:
    """Return the position of the bracket that closes the one at `at`, or None. Brackets of other kinds do not count."""
    opens = text[at]
    closes = _CLOSING[_OPENING.index(opens)]
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == opens) - (text[place] == closes)
        if depth == 0:
            return place
    return None


def iterate_top_level(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the position and character of all text outside of parentheses, brackets, braces and template arguments. The
    opening and closing characters themselves are included.

    Stop at the first closing character whose opening one is before `start`.
    """
    inside: list[str] = []
    for at in range(start, len(text)):
        c = text[at]
        if c in _CLOSING:
            while inside and inside[-1] == "<":  # it was a comparison
                inside.pop()
            if not inside:
                return
            inside.pop()
        elif c == ">" and inside[-1:] == ["<"]:
            inside.pop()
        if not inside:
            yield at, c
        if c in _OPENING or (c == "<" and text[start:at].rstrip()[-1:].isidentifier()):
            inside.append(c)


def split_at_commas(text: str) -> list[str]:
    """Return the parts between the commas that are outside of brackets. The list of a blank text is empty."""
    cuts = [at for at, c in iterate_top_level(text) if c == ","]
    parts = [text[a + 1 : b] for a, b in zip([-1, *cuts], [*cuts, len(text)], strict=True)]
    return parts if text.strip() else []
