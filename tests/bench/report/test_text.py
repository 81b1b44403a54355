"""Markdown that fits 80 columns."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from cortexmlx.bench.report.report import model_lines
from cortexmlx.bench.report.section import ReportSection, ReportTable
from cortexmlx.bench.report.text import as_markdown, list_markdown, table_markdown
from support.cli.bench_reports import MODEL, report


def test_long_lines_are_wrapped_and_short_tables_are_aligned() -> None:
    text = as_markdown(
        report(
            ReportSection("x", "A title", (ReportTable(("a", "b"), (("one", "1"), ("three", "22"))),), ("word " * 40,))
        )
    )
    assert "## A title" in text and "| three | 22 |" in text and "| one   |  1 |" in text
    assert max(map(len, text.splitlines())) <= 80
    assert list_markdown(["x" * 5]) == "- xxxxx"
    assert max(map(len, list_markdown(["word " * 40], 40).splitlines())) <= 40


def test_spare_columns_leave_only_where_there_is_no_room() -> None:
    narrow = ReportTable(("model", "t/s"), (("m", "1"),), 1, ("model",))
    assert "model" in table_markdown(narrow)
    wide = ReportTable(("model", "t/s"), (("m" * 90, "1"),), 1, ("model",))
    assert "model" not in table_markdown(wide) and "t/s" in table_markdown(wide)


def test_a_part_needs_no_more_than_a_title_and_does_not_change() -> None:
    part = ReportSection("rows", "Speed", ())
    assert not (part.records or part.notes)
    with pytest.raises(FrozenInstanceError):
        part.key = "other"  # type: ignore[misc]


def test_the_header_names_machine_model_and_notes() -> None:
    made = report(ReportSection("rows", "Speed", ()))
    assert made.header()[:3] == made.machine.lines()
    assert made.header()[3:] == ["m: 3 M parameters, 512 MiB, llama, float32", "a note", "another"]


def test_a_tiny_models_parameters_are_counted() -> None:
    assert "3 M parameters" in model_lines(MODEL)[0]
    assert "90,000 parameters" in model_lines(replace(MODEL, parameters=90_000))[0]
