"""The report's section that compares with mlx-lm: a row for each measure, and all figures below the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cortexmlx.bench.measure.pairs import Comparison
from cortexmlx.bench.report.section import ReportSection, ReportTable
from cortexmlx.bench.report.text import format_number

HEADINGS = ("case", "measure", "cortexmlx", "mlx-lm", "ratio", "least", "most", "target", "met")
BELOW = (
    "ratio: cortexmlx over mlx-lm, the median of the pairs of runs, and the least and the greatest of them. Of s and "
    "bytes less is better.",
)


def ratios_section(comparisons: Sequence[Comparison]) -> ReportSection:
    """Return the section that compares with mlx-lm: a row for each comparison, all figures below."""
    table = ReportTable(HEADINGS, tuple(map(_table_row, comparisons)), 2, ("met", "least", "most", "measure"))
    raw = tuple(map(_raw_figures, comparisons))
    return ReportSection(
        "comparisons", "Beside mlx-lm", (table,), (*BELOW, *raw), tuple(map(_json_record, comparisons))
    )


def _table_row(c: Comparison) -> tuple[str, ...]:
    return (
        c.case,
        f"{c.measure}, {c.unit}",
        format_number(sorted(c.ours)[len(c.ours) // 2]),
        format_number(sorted(c.theirs)[len(c.theirs) // 2]),
        f"{c.ratio:.2f}x",
        f"{min(c.ratios):.2f}",
        f"{max(c.ratios):.2f}",
        f"{c.better.value} {c.target:g}x",
        "yes" if c.meets_target else "no",
    )


def _json_record(c: Comparison) -> dict[str, Any]:
    derived_figures = {"ratio": c.ratio, "ratios": c.ratios, "cpu_ratio": c.cpu_ratio, "met": c.meets_target}
    return {**asdict(c), "better": c.better.value, **derived_figures}


def _raw_figures(c: Comparison) -> str:
    """Return all figures of a comparison as one line of text."""
    our_text, their_text = (", ".join(format_number(x) for x in figures) for figures in (c.ours, c.theirs))
    same_note = f"same tokens in {c.same_tokens} of {c.requests} requests"
    cpu = "" if c.cpu_ratio is None else f"; {c.cpu_ratio:.2f}x by CPU time"
    return f"{c.case}, {c.measure} ({c.what}): cortexmlx {our_text}; mlx-lm {their_text} {c.unit}{cpu}; {same_note}"
