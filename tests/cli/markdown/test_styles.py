"""No colour vanishes on a light or a dark background."""

from __future__ import annotations

import pytest
from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.style import Style

from cortexmlx.cli.markdown import styles
from cortexmlx.cli.terminal.blockmap import STATE_STYLES

BACKGROUNDS = {"black": "#000000", "dark grey": "#1e1e1e", "white": "#ffffff", "light": "#fdf6e3", "blue": "#002b36"}
ALL = {**vars(styles), **styles.SYNTAX, **{look.name: Style.parse(look.style) for look in STATE_STYLES.values()}}
COLOURED = {name: style for name, style in ALL.items() if isinstance(style, Style) and style.color}


def luminance(colour: ColorTriplet) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour.normalized]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("name", COLOURED)
def test_a_colour_can_be_read_on_every_background(name: str) -> None:
    """3:1 is what WCAG asks of large text and of signs."""
    colour = COLOURED[name].color
    assert colour is not None and colour.number is not None and colour.number >= 16, "the basic sixteen are the user's"
    for background, value in BACKGROUNDS.items():
        behind = Color.parse(value).get_truecolor()
        light, dark = sorted((luminance(colour.get_truecolor()), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, background


def test_no_style_has_a_background() -> None:
    assert len(COLOURED) > 12 and all(style.bgcolor is None for style in COLOURED.values())
