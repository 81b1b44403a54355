"""A section is plain data."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from cortexmlx.bench.report.section import ReportSection


def test_a_part_needs_no_more_than_a_title_and_does_not_change() -> None:
    part = ReportSection("rows", "Speed", ())
    assert not (part.records or part.bars or part.series or part.below)
    with pytest.raises(FrozenInstanceError):
        part.key = "other"  # type: ignore[misc]
