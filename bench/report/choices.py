"""The ways of decode attention in a report."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.bench.report.section import ReportSection, Table
from cortexmlx.stats import TimedChoice


def choices(found: Sequence[TimedChoice]) -> ReportSection:
    """Return the section with the time of each way, the fastest first, and the one that an engine would take."""
    rows = tuple(
        (choice.batch, name, f"{seconds * 1e6:,.0f}", "serves" if name == choice.chosen else "")
        for choice in found
        for name, seconds in sorted(choice.seconds.items(), key=lambda each: each[1])
    )
    refused = sorted({f"{name} cannot serve: {why}" for choice in found for name, why in choice.refused.items()})
    below = (
        "Microseconds of one layer's attention, median. The fastest way serves, unless the rules' choice is nearly as "
        "fast. Classes with one way are left out.",
        *refused,
    )
    records = tuple(
        {
            "job": choice.job,
            "batch": choice.batch,
            "chosen": choice.chosen,
            "seconds": dict(choice.seconds),
            "refused": dict(choice.refused),
        }
        for choice in found
    )
    table = Table(("decode attention", "way", "us", ""), rows, 2)
    return ReportSection("choices", "Ways of decode attention", (table,), below, records)
