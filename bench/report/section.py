"""One section of a report as plain data: tables and records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
