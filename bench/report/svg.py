"""Draws the figures of a report in SVG: bars with whiskers from the lowest to the highest repetition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from cortexmlx.bench.report.report import Report
from cortexmlx.bench.report.section import ChartBar

WIDTH = 760
_LEFT, _RIGHT, _LINE, _BAR, _TOP = 250, 90, 26, 16, 58
_STYLE = """\
text { font: 13px ui-monospace, Menlo, monospace; fill: #24292f }
.title { font-weight: bold; font-size: 15px } .small { font-size: 11px; fill: #57606a }
rect { fill: #4078c0 } .whisker { stroke: #24292f; stroke-width: 1.5 } .page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b3 } rect { fill: #58a6ff } .whisker { stroke: #e6edf3 }
  .page { fill: #0d1117 }
}"""


def as_svg(report: Report) -> str:
    """Return a report's bars as an SVG document. Bars of one unit and kind share a scale that begins at 0."""
    bars = sorted((bar for part in report.parts for bar in part.bars), key=lambda bar: bar.group)
    model = "" if report.model is None else f"{report.model.name}, "
    top = [_text_element(16, 24, f"cortexmlx bench: {model}{report.machine.chip}", "title")]
    top.append(_text_element(16, 42, report.machine.software(), "small"))
    y, elements = _TOP, list[str]()
    for name, group in groupby(bars, key=lambda bar: bar.group):
        lines, y = _draw_group(name, list(group), y)
        elements += lines
    page = f'<rect class="page" width="{WIDTH}" height="{y}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", page, *top, *elements, "</svg>", ""])


def _draw_group(name: str, bars: Sequence[ChartBar], y: int) -> tuple[list[str], int]:
    """Return the SVG elements of a group of bars that begins at `y`, and the `y` of the next group."""
    max_value = max(max(bar.value, bar.high) for bar in bars) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / max_value
    lines = [_text_element(16, y + 18, f"{name}, {bars[0].unit}", "small")]
    y += _LINE
    for bar in bars:
        middle = y + _BAR / 2
        low, high = (_LEFT + scale * end for end in (bar.low, bar.high))
        lines.append(_text_element(_LEFT - 8, middle + 4, bar.label, "", "end"))
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{scale * bar.value:.1f}" height="{_BAR}"/>')
        if bar.high > bar.low:
            lines.append(f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}"/>')
        lines.append(_text_element(WIDTH - 16, middle + 4, f"{bar.value:,.1f}", "", "end"))
        y += _LINE
    return lines, y + 10


def _text_element(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    """Return an SVG text element. `kind` is its CSS class."""
    class_attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{class_attribute}>{escape(text)}</text>'
