"""Writes a report for people: Markdown that fits 80 columns, and narrower terminals if it can."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cortexmlx.bench.report.report import Report
from cortexmlx.bench.report.section import ReportSection, ReportTable

WIDTH = 80


def as_markdown(report: Report, width: int = WIDTH) -> str:
    """Return a report as Markdown: the header's lines, and the title, tables and notes of its section."""
    return f"{list_markdown(report.header(), width)}\n\n{section_markdown(report.section, width)}"


def section_markdown(part: ReportSection, width: int = WIDTH) -> str:
    """Return one section as Markdown."""
    tables = [table_markdown(each, width) for each in part.tables]
    return "\n\n".join([f"## {part.title}", *tables, *([list_markdown(part.notes, width)] if part.notes else [])])


def list_markdown(lines: Sequence[str], width: int = WIDTH) -> str:
    """Return lines as a Markdown list."""
    return "\n".join(
        textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    )


def table_markdown(table: ReportTable, width: int = WIDTH) -> str:
    """Return a Markdown table with aligned columns. A table that is too wide loses `spare` columns."""
    visible_table = table
    for heading in table.spare:
        if _table_width(visible_table) <= width:
            break
        visible_table = _drop_column(visible_table, heading)
    widths = _column_widths(visible_table)

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, strict=True)
        padded = (c.ljust(w) if i < visible_table.left_columns else c.rjust(w) for i, (c, w) in enumerate(columns))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + ("-" if i < visible_table.left_columns else ":") for i, w in enumerate(widths))
    return "\n".join([line(visible_table.headings), f"|{rule}|", *map(line, visible_table.rows)])


def format_number(value: float) -> str:
    """Return the value as text with four digits, or all digits of a large value."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _column_widths(table: ReportTable) -> list[int]:
    """Return the width of each column in characters."""
    return [max(len(line[i]) for line in (table.headings, *table.rows)) for i in range(len(table.headings))]


def _table_width(table: ReportTable) -> int:
    """Return the width of a table in characters."""
    return sum(_column_widths(table)) + 3 * len(table.headings) + 1


def _drop_column(table: ReportTable, heading: str) -> ReportTable:
    column_index = table.headings.index(heading)

    def cut(cells: tuple[str, ...]) -> tuple[str, ...]:
        return cells[:column_index] + cells[column_index + 1 :]

    return ReportTable(
        cut(table.headings),
        tuple(map(cut, table.rows)),
        max(1, table.left_columns - (column_index < table.left_columns)),
    )
