"""Comparisons with mlx-lm in a report: a row for each measure, and all figures below the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cortexmlx.bench.measure.pairs import Comparison
from cortexmlx.bench.report.section import Bar, ReportSection, Series, Table
from cortexmlx.bench.report.text import number

HEADINGS = ("case", "measure", "cortexmlx", "mlx-lm", "ratio", "least", "most", "target", "met")
BELOW = (
    "ratio: cortexmlx over mlx-lm, the median of the pairs of runs, and the least and the greatest of them. Of s and "
    "bytes less is better.",
)


def part(comparisons: Sequence[Comparison]) -> ReportSection:
    """Return the section: a row for each comparison, all figures below."""
    table = Table(HEADINGS, tuple(map(_cells, comparisons)), 2, ("met", "least", "most", "measure"))
    raw = tuple(map(_raw, comparisons))
    bars = tuple(
        Bar(
            "ratio to mlx-lm",
            f"{c.case}: {c.measure}"[:28],
            "cortexmlx over mlx-lm",
            c.ratio,
            min(c.ratios),
            max(c.ratios),
        )
        for c in comparisons
    )
    series = tuple(Series(f"{c.case}, {c.measure}", "of mlx-lm's", c.better, c.ratios) for c in comparisons)
    return ReportSection(
        "comparisons", "Beside mlx-lm", (table,), (*BELOW, *raw), tuple(map(_record, comparisons)), bars, series
    )


def _cells(c: Comparison) -> tuple[str, ...]:
    return (
        c.case,
        f"{c.measure}, {c.unit}",
        number(sorted(c.ours)[len(c.ours) // 2]),
        number(sorted(c.theirs)[len(c.theirs) // 2]),
        f"{c.ratio:.2f}x",
        f"{min(c.ratios):.2f}",
        f"{max(c.ratios):.2f}",
        f"{c.better.value} {c.target:g}x",
        "yes" if c.met else "no",
    )


def _record(c: Comparison) -> dict[str, Any]:
    derived = {"ratio": c.ratio, "ratios": c.ratios, "cpu_ratio": c.cpu_ratio, "met": c.met}
    return {**asdict(c), "better": c.better.value, **derived}


def _raw(c: Comparison) -> str:
    ours, theirs = (", ".join(number(x) for x in side) for side in (c.ours, c.theirs))
    same = f"same tokens in {c.same_tokens} of {c.requests} requests"
    cpu = "" if c.cpu_ratio is None else f"; {c.cpu_ratio:.2f}x by CPU time"
    return f"{c.case}, {c.measure} ({c.what}): cortexmlx {ours}; mlx-lm {theirs} {c.unit}{cpu}; {same}"
