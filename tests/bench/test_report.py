"""What a benchmark reports: for people in 80 columns, and every figure for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import pytest

from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.pairs import BetterDirection, Comparison
from cortexmlx.bench.report import (
    Report,
    ReportSection,
    ReportTable,
    as_json,
    as_markdown,
    list_markdown,
    model_lines,
    section_markdown,
    table_markdown,
)
from cortexmlx.bench.session import ratios_section, speed_section
from cortexmlx.bench.suites import rows
from cortexmlx.bench.suites.rows import SpeedTest, StepSplit
from cortexmlx.stats import ModelInfo

MODEL = ModelInfo(
    **{f.name: 0 for f in fields(ModelInfo)}  # type: ignore[arg-type]
    | {
        "name": "m",
        "notes": ("a note",),
        "parameters": 3_000_000,
        "weight_bytes": 2**29,
        "architecture": "llama",
        "dtype": "float32",
        "identity": "abc",
    }
)
SPLIT = StepSplit(9, 0.5, 1.0, 2.0, 0.25)
ROW = rows.TestResult(SpeedTest(0, 128, 4, 512), 32, (40.0, 44.0), (20.0, 25.0), 2**29, 3 * 2**30, SPLIT, 1024)
COMPARED = Comparison(
    "pp512", "a prompt", "prefill", "tok/s", BetterDirection.HIGHER, 1.0, (3000.0, 1.5), (2000.0, 3.0), (), (), 1, 2
)


def report(section: ReportSection) -> Report:
    """With this section."""
    return Report(BenchMachine.detect(), MODEL, section, ("another",))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_reads_like_llama_benchs() -> None:
    lines = section_markdown(
        speed_section(
            [replace(ROW, test=replace(ROW.test, batch=1, depth=0))], replace(MODEL, name="some/where/m"), "CPU"
        )
    ).splitlines()
    assert cells(lines[2]) == ["model", "size", "params", "backend", "block", "test", "t/s"]
    assert cells(lines[4]) == ["m", "512.0 MiB", "3.00 M", "CPU", "32", "tg128", "42.00 ± 2.83"]
    assert cells(lines[8]) == ["tg128", "32", "1", "512.0", "3.00"]


def test_batches_have_a_column_and_long_names_leave_the_table_at_80_columns() -> None:
    model = replace(MODEL, name="Qwen3-30B-A3B-Instruct-2507-4bit", parameters=30_500_000_000)
    text = section_markdown(speed_section([ROW], model, "Metal"))
    assert max(map(len, text.splitlines())) <= 80
    head = cells(text.splitlines()[2])
    assert head == ["size", "params", "backend", "block", "batch", "test", "t/s"]
    assert "| 30.50 B |" in text and "tg128 @ d512" in text


def test_a_row_is_readable_in_a_narrow_window() -> None:
    row = replace(ROW, test=replace(ROW.test, batch=1, depth=0))
    lines = section_markdown(speed_section([row, row], MODEL, "Metal"), 40).splitlines()
    assert max(map(len, lines)) <= 40 and cells(lines[2])[-2:] == ["test", "t/s"]


def test_records_hold_every_repetition() -> None:
    part = speed_section([ROW], MODEL, "CPU")
    [record] = part.records
    written = json.loads(as_json(report(part)))
    assert [written["rows"][0]["kv_bytes"], written["model"]["name"], written["notes"]] == [2**29, "m", ["another"]]
    assert written["machine"] == asdict(BenchMachine.detect())
    assert (record["test"], record["kv_bytes"]) == ("tg128 @ d512", 2**29)
    assert record["tokens_per_second"] == (40.0, 44.0)
    assert (record["build_ms"], record["cpu_ms_per_token"], record["tokens"]) == (1.0, pytest.approx(1000 / 22.5), 1024)


def test_a_comparison_says_its_ratio_and_whether_that_is_enough() -> None:
    part = ratios_section([COMPARED])
    text = section_markdown(part)
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if line.startswith("| pp512"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "pp512" and "1.00x" in cells and ">= 1x" in cells
    joined = " ".join(text.split())
    assert "cortexmlx 3,000, 1.5; mlx-lm 2,000, 3 tok/s; same tokens in 1 of 2 requests" in joined
    [record] = part.records
    assert (record["better"], record["ratios"], record["cpu_ratio"], record["met"]) == (">=", (1.5, 0.5), None, True)


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


def test_the_header_names_machine_model_and_notes() -> None:
    made = report(ReportSection("rows", "Speed", ()))
    assert made.header()[:3] == made.machine.lines()
    assert made.header()[3:] == ["m: 3 M parameters, 512 MiB, llama, float32", "a note", "another"]
    assert "90,000 parameters" in model_lines(replace(MODEL, parameters=90_000))[0]
