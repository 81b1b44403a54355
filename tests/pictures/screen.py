"""A terminal's screen as a picture."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import groupby

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text


def svg(screen: pyte.Screen, title: str) -> str:
    """The rows of a screen down to the last that shows something, as a picture that needs nothing from elsewhere."""
    rows = [[screen.buffer[y][x] for x in range(screen.columns)] for y in range(screen.lines)]
    while rows and not any(cell.data.strip() for cell in rows[-1]):
        rows.pop()
    console = Console(
        record=True, width=screen.columns, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for row in rows:
        console.print(line(row), soft_wrap=True)
    drawn = re.sub(r"\s*@font-face \{.*?\}\n", "\n", console.export_svg(title=title), flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def line(row: Sequence[Char]) -> Text:
    """A row with its colours."""
    text = Text()
    for style, cells in groupby(row, key=style_of):
        text.append("".join(cell.data for cell in cells), style)
    text.rstrip()
    return text


def style_of(cell: Char) -> Style:
    """How rich calls what pyte says of a character."""
    return Style(
        color=_colour(cell.fg),
        bgcolor=_colour(cell.bg),
        bold=cell.bold or None,
        italic=cell.italics or None,
        underline=cell.underscore or None,
        reverse=cell.reverse or None,
    )


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    return (
        f"#{name}"
        if re.fullmatch(r"[0-9a-f]{6}", name)
        else name.replace("bright", "bright_").replace("brown", "yellow")
    )
