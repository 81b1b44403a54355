"""Bar charts for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.bench.report.section import ChartBar

WIDTH = 80
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar_chart(bars: Sequence[ChartBar], width: int = WIDTH) -> str:
    """Return a chart of each group of two or more bars; "" if there is no such group. Each scale begins at 0."""
    groups = [(name, [bar for bar in bars if bar.group == name]) for name in dict.fromkeys(bar.group for bar in bars)]
    return "\n\n".join(_draw_group(name, group, width) for name, group in groups if len(group) > 1)


def _draw_group(name: str, bars: Sequence[ChartBar], width: int) -> str:
    max_value = max(bar.value for bar in bars) or 1.0
    labels = max(len(bar.label) for bar in bars)
    figures = max(len(f"{bar.value:,.1f}") for bar in bars)
    bar_width = max(width - labels - figures - 3, 8)
    lines = [
        f"{bar.label:<{labels}} {bar.value:>{figures},.1f} {_draw_bar(bar.value / max_value * bar_width)}"
        for bar in bars
    ]
    return "\n".join([f"{name}, {bars[0].unit}", *lines])


def _draw_bar(cells: float) -> str:
    """Return a bar of `cells` character cells, exact to an eighth."""
    eighths = round(cells * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
