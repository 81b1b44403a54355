"""Bars for a terminal: figures of one kind side by side."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.bench.report.section import Bar

WIDTH = 80
_EIGHTHS = " ▏▎▍▌▋▊▉"


def chart(bars: Sequence[Bar], width: int = WIDTH) -> str:
    """Return each group of two or more bars under its name; "" if there is no such group. A scale begins at 0."""
    groups = [(name, [bar for bar in bars if bar.group == name]) for name in dict.fromkeys(bar.group for bar in bars)]
    return "\n\n".join(_group(name, group, width) for name, group in groups if len(group) > 1)


def _group(name: str, bars: Sequence[Bar], width: int) -> str:
    most = max(bar.value for bar in bars) or 1.0
    labels = max(len(bar.label) for bar in bars)
    figures = max(len(f"{bar.value:,.1f}") for bar in bars)
    room = max(width - labels - figures - 3, 8)
    lines = [f"{bar.label:<{labels}} {bar.value:>{figures},.1f} {_drawn(bar.value / most * room)}" for bar in bars]
    return "\n".join([f"{name}, {bars[0].unit}", *lines])


def _drawn(cells: float) -> str:
    """Return a bar of `cells` character cells, exact to an eighth."""
    eighths = round(cells * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
