"""Rows as llama-bench has them, in 80 columns, and what a program reads of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortexmlx.bench.report import speed
from cortexmlx.bench.report.text import section_markdown
from support.cli.bench_reports import MODEL, ROW


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_reads_like_llama_benchs() -> None:
    lines = section_markdown(
        speed.speed_section(
            [replace(ROW, test=replace(ROW.test, batch=1, depth=0))], replace(MODEL, name="some/where/m"), "CPU"
        )
    ).splitlines()
    assert cells(lines[2]) == ["model", "size", "params", "backend", "block", "test", "t/s"]
    assert cells(lines[4]) == ["m", "512.0 MiB", "3.00 M", "CPU", "32", "tg128", "42.00 ± 2.83"]
    assert cells(lines[8]) == ["tg128", "32", "1", "512.0", "3.00"]


def test_batches_have_a_column_and_long_names_leave_the_table_at_80_columns() -> None:
    model = replace(MODEL, name="Qwen3-30B-A3B-Instruct-2507-4bit", parameters=30_500_000_000)
    text = section_markdown(speed.speed_section([ROW], model, "Metal"))
    assert max(map(len, text.splitlines())) <= 80
    head = cells(text.splitlines()[2])
    assert head == ["size", "params", "backend", "block", "batch", "test", "t/s"]
    assert "| 30.50 B |" in text and "tg128 @ d512" in text


def test_a_row_is_readable_in_a_narrow_window() -> None:
    row = replace(ROW, test=replace(ROW.test, batch=1, depth=0))
    lines = section_markdown(speed.speed_section([row, row], MODEL, "Metal"), 40).splitlines()
    assert max(map(len, lines)) <= 40 and cells(lines[2])[-2:] == ["test", "t/s"]


def test_records_hold_every_repetition() -> None:
    part = speed.speed_section([ROW], MODEL, "CPU")
    [record] = part.records
    assert (record["test"], record["kv_bytes"]) == ("tg128 @ d512", 2**29)
    assert record["tokens_per_second"] == (40.0, 44.0)
    assert (record["build_ms"], record["cpu_ms_per_token"], record["tokens"]) == (1.0, pytest.approx(1000 / 22.5), 1024)
