"""One section of a report as plain data: tables, records, bars, and the figures that a later run can be compared
with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.bench.measure.pairs import BetterDirection


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
class ChartBar:
    """A figure to draw as a bar."""

    group: str
    """Bars of one group share a scale."""
    label: str
    unit: str
    value: float


@dataclass(frozen=True)
class FigureSeries:
    """The repetitions of one figure, for comparison with those of another run."""

    name: str
    unit: str
    better: BetterDirection
    values: tuple[float, ...]
    machine: str = ""
    """The part of the machine that limits the figure, as `measure.yardstick` names it. "" if the machine's speed does
    not matter, as for a ratio of two contestants that took turns.
    """
    clock: str = "wall"
    """"wall" or "CPU"."""
    beside: tuple[float, ...] = ()
    """Seconds of that part of the yardstick around each repetition; empty if they were not measured."""
    rounds: tuple[int, ...] = ()
    """The round of each repetition, whose engine was opened for it. Empty: each repetition is a round."""


@dataclass(frozen=True)
class ReportSection:
    """A section of a report: its tables, and the same figures as records and bars."""

    key: str
    """Its key in JSON."""
    title: str
    tables: tuple[ReportTable, ...]
    notes: tuple[str, ...] = ()
    """Lines below the tables."""
    records: tuple[Mapping[str, Any], ...] = ()
    """The figures for programs."""
    bars: tuple[ChartBar, ...] = ()
    series: tuple[FigureSeries, ...] = field(default=())
