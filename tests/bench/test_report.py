"""The outcome of a benchmark for people and for programs."""

from __future__ import annotations

import csv
import io
import json

import pytest

from support.bench_model import bench


def test_json_lines_and_csv_hold_one_record_per_row(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tests = ["-p", "8", "-n", "3", "-r", "1"]
    lines = [json.loads(line) for line in bench(capsys, model, *tests, "-o", "jsonl").splitlines()]
    assert [line["test"] for line in lines] == ["pp8", "tg3"]
    records = list(csv.DictReader(io.StringIO(bench(capsys, model, *tests, "-o", "csv"))))
    assert [record["test"] for record in records] == ["pp8", "tg3"]
    assert float(records[0]["mean_tokens_per_second"]) > 0


def test_markdown_names_the_machine_and_the_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = bench(capsys, model, "-p", "8", "-n", "3", "-r", "2")
    assert "mlx-lm 0.32.2" in text
    assert "llama" in text
    assert "| pp8 " in text
    assert " ± " in text
