"""The ways of decode attention as a table."""

from __future__ import annotations

from cortexmlx.bench.report.choices import choices
from cortexmlx.bench.report.text import of_part
from cortexmlx.stats import ChoiceSource, TimedChoice


def test_the_fastest_is_first_and_the_one_that_serves_is_marked() -> None:
    found = [
        TimedChoice(
            "attention float16",
            "1 row",
            "vector kernel",
            ChoiceSource.TIMED,
            {"vector kernel": 12.4e-6, "matrix kernel": 12e-6},
            {"wide kernel": "it spills"},
        ),
        TimedChoice("attention float16", "2 rows", "vector kernel", ChoiceSource.RULE),
    ]
    part = choices(found)
    lines = [line for line in of_part(part).splitlines() if line.startswith("| 1 row")]
    assert [" ".join(line.split()) for line in lines] == [
        "| 1 row | matrix kernel | 12 | |",
        "| 1 row | vector kernel | 12 | serves |",
    ]
    assert "wide kernel cannot serve: it spills" in part.below
    assert part.records[0]["seconds"] == {"vector kernel": 12.4e-6, "matrix kernel": 12e-6} and len(part.records) == 2
