"""A report for people: Markdown that fits 80 columns, and narrower terminals if it can."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cortexmlx.bench.report.report import Report
from cortexmlx.bench.report.section import ReportSection, Table

WIDTH = 80


def markdown(report: Report, width: int = WIDTH) -> str:
    """Return the header's lines, and for each part its title, its tables, and the lines below them."""
    return "\n\n".join([items(report.header(), width), *(of_part(part, width) for part in report.parts)])


def of_part(part: ReportSection, width: int = WIDTH) -> str:
    """Return one section."""
    tables = [table(each, width) for each in part.tables]
    return "\n\n".join([f"## {part.title}", *tables, *([items(part.below, width)] if part.below else [])])


def items(lines: Sequence[str], width: int = WIDTH) -> str:
    """Return a Markdown list."""
    return "\n".join(
        textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    )


def table(given: Table, width: int = WIDTH) -> str:
    """Return a Markdown table with aligned columns. A table that is too wide loses `spare` columns."""
    shown = given
    for gone in given.spare:
        if _width(shown) <= width:
            break
        shown = _without(shown, gone)
    widths = _widths(shown)

    def line(cells: Sequence[str]) -> str:
        both = zip(cells, widths, strict=True)
        padded = (c.ljust(w) if i < shown.left else c.rjust(w) for i, (c, w) in enumerate(both))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + ("-" if i < shown.left else ":") for i, w in enumerate(widths))
    return "\n".join([line(shown.headings), f"|{rule}|", *map(line, shown.rows)])


def number(value: float) -> str:
    """Return the value with four digits, or all digits of a large value."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _widths(shown: Table) -> list[int]:
    return [max(len(line[i]) for line in (shown.headings, *shown.rows)) for i in range(len(shown.headings))]


def _width(shown: Table) -> int:
    return sum(_widths(shown)) + 3 * len(shown.headings) + 1


def _without(shown: Table, heading: str) -> Table:
    at = shown.headings.index(heading)

    def cut(cells: tuple[str, ...]) -> tuple[str, ...]:
        return cells[:at] + cells[at + 1 :]

    return Table(cut(shown.headings), tuple(map(cut, shown.rows)), max(1, shown.left - (at < shown.left)))
