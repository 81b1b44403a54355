"""One section of a report as plain data: whoever measured it says what stands in its table, in its records, in its
chart, and which of its figures a later run can be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cortexmlx.bench.measure.pairs import Better


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; the first `left` columns are aligned to the left. Columns in `spare` leave the table,
    one after the other, where it would be wider than the terminal, or than 80 columns.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    spare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A figure to draw, between the lowest and the highest of its repetitions. Bars of one `group` share a scale, in
    `unit`.
    """

    group: str
    label: str
    unit: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """The repetitions of one figure, to be compared with those of another run. `machine` names the part of the
    machine's own speed that it goes by (of `measure.yardstick`), or "" where that is no matter, as for a ratio of two
    contestants that took turns. `clock`: "wall" or "CPU".

    `beside` are the seconds of that part of the machine around each repetition, where it was measured so closely;
    `rounds` in which round each was measured, with an engine that was opened for it (none: each is a round).
    """

    name: str
    unit: str
    better: Better
    values: tuple[float, ...]
    machine: str = ""
    clock: str = "wall"
    beside: tuple[float, ...] = ()
    rounds: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReportSection:
    """A section: its `key` in JSON, a title, tables, lines below them, records for programs, bars, series."""

    key: str
    title: str
    tables: tuple[Table, ...]
    below: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = ()
    bars: tuple[Bar, ...] = ()
    series: tuple[Series, ...] = field(default=())
