"""A report of `cortexmlx bench` as tables and JSON. Its sections are made in `session.py` and the suites."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import ModelInfo


@dataclass(frozen=True)
class ReportTable:
    """A table of a report: headings and rows of text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_columns: int = 1
    """The first `left_columns` columns are aligned to the left."""
    spare: tuple[str, ...] = ()
    """Columns to drop, in this order, while the table is wider than the terminal, or than 80 columns."""


@dataclass(frozen=True)
class ReportSection:
    """A section of a report: its tables, and the same figures as records."""

    key: str
    """Its key in JSON."""
    title: str
    tables: tuple[ReportTable, ...]
    notes: tuple[str, ...] = ()
    """Lines below the tables."""
    records: tuple[Mapping[str, Any], ...] = ()
    """The figures for programs."""


GIB = 1024**3


@dataclass(frozen=True)
class Report:
    """Everything that one `cortexmlx bench` measured, with the machine and the model."""

    machine: BenchMachine
    model: ModelInfo | None
    section: ReportSection
    notes: tuple[str, ...] = ()
    """Lines that a reader must know."""
    settings: dict[str, str] = field(default_factory=dict)
    """Options of the engine that change its figures."""
    interrupted: bool = False
    """Whether something that was asked for is missing."""

    def header(self) -> list[str]:
        """Return the lines above the results: the machine, the model, and notes."""
        return [*self.machine.lines(), *model_lines(self.model), *self.notes]


def model_lines(model: ModelInfo | None) -> list[str]:
    """Return a line that describes the model, and its notes."""
    if model is None:
        return []
    count = f"{model.parameters / 1e6:,.0f} M" if model.parameters >= 1e6 else f"{model.parameters:,}"
    size = f"{count} parameters, {format_bytes(model.weight_bytes)}"
    return [f"{model.name}: {size}, {model.architecture}, {model.dtype}", *model.notes]


def as_json(report: Report) -> str:
    """Return a report as JSON text: machine, model, notes, and the section's records under its key."""
    model = None if report.model is None else asdict(report.model)
    shell = {"machine": asdict(report.machine), "model": model, "notes": report.notes, "settings": report.settings}
    rest = {"interrupted": report.interrupted, report.section.key: report.section.records}
    return json.dumps({**shell, **rest}, indent=2)


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
        if sum(_column_widths(visible_table)) + 3 * len(visible_table.headings) + 1 <= width:
            break
        visible_table = _drop_column(visible_table, heading)
    widths = _column_widths(visible_table)

    def format_row(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, strict=True)
        padded = (c.ljust(w) if i < visible_table.left_columns else c.rjust(w) for i, (c, w) in enumerate(columns))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 1) + ("-" if i < visible_table.left_columns else ":") for i, w in enumerate(widths))
    return "\n".join([format_row(visible_table.headings), f"|{rule}|", *map(format_row, visible_table.rows)])


def format_number(value: float) -> str:
    """Return the value as text, rounded to four significant digits; from 1,000 on to an integer."""
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.4g}"


def _column_widths(table: ReportTable) -> list[int]:
    """Return the width of each column in characters."""
    return [max(len(line[i]) for line in (table.headings, *table.rows)) for i in range(len(table.headings))]


def _drop_column(table: ReportTable, heading: str) -> ReportTable:
    column_index = table.headings.index(heading)

    def drop_cell(cells: tuple[str, ...]) -> tuple[str, ...]:
        return cells[:column_index] + cells[column_index + 1 :]

    return ReportTable(
        drop_cell(table.headings),
        tuple(map(drop_cell, table.rows)),
        max(1, table.left_columns - (column_index < table.left_columns)),
    )
