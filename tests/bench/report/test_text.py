"""Markdown that fits 80 columns."""

from __future__ import annotations

from cortexmlx.bench.report.section import ReportSection, Table
from cortexmlx.bench.report.text import items, markdown, table
from support.cli.bench_reports import report


def test_long_lines_are_wrapped_and_short_tables_are_aligned() -> None:
    text = markdown(
        report(ReportSection("x", "A title", (Table(("a", "b"), (("one", "1"), ("three", "22"))),), ("word " * 40,)))
    )
    assert "## A title" in text and "| three | 22 |" in text and "| one   |  1 |" in text
    assert max(map(len, text.splitlines())) <= 80
    assert items(["x" * 5]) == "- xxxxx"
    assert max(map(len, items(["word " * 40], 40).splitlines())) <= 40


def test_spare_columns_leave_only_where_there_is_no_room() -> None:
    narrow = Table(("model", "t/s"), (("m", "1"),), 1, ("model",))
    assert "model" in table(narrow)
    wide = Table(("model", "t/s"), (("m" * 90, "1"),), 1, ("model",))
    assert "model" not in table(wide) and "t/s" in table(wide)
