"""The outcome of a benchmark for people and for programs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, fields

import pytest

from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.measure.pairs import Better, Comparison
from cortexmlx.bench.report import Report, as_csv, as_json, json_lines, markdown
from cortexmlx.bench.suites import rows
from cortexmlx.bench.suites.rows import Row, StepSplit
from cortexmlx.stats import ModelInfo
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


ROW = Row(
    rows.Test(0, 128, 4, 512), 32, (40.0, 44.0), (20.0, 25.0), 2**29, 3 * 2**30, StepSplit(9, 0.5, 1.0, 2.0, 0.25)
)
COMPARED = Comparison(
    "pp512", "a prompt", "prefill", "tok/s", Better.HIGHER, 1.0, (3000.0, 1.5), (2000.0, 3.0), (), (), 1, 2
)


def report(*, rows: tuple[Row, ...] = (), comparisons: tuple[Comparison, ...] = ()) -> Report:
    info = ModelInfo(**{f.name: 0 for f in fields(ModelInfo)} | {"name": "m", "notes": ("a note",)})  # type: ignore[arg-type]
    return Report(Machine.here(), info, rows, comparisons, ("another",))


def test_a_row_says_what_it_measured_in_every_format() -> None:
    made = report(rows=(ROW,))
    text = markdown(made)
    cells = [cell.strip() for cell in text.splitlines()[-3].strip("|").split("|")]
    assert cells == [
        "tg128 @ d512",
        "32",
        "4",
        "42.00 ± 2.83",
        "44.44",
        "0.500",
        "3.00",
        "0.50",
        "1.00",
        "2.00",
        "0.25",
    ]
    assert "- a note\n- another" in text
    [record] = json.loads(as_json(made))["rows"]
    assert (record["test"], record["tokens_per_second"], record["kv_bytes"]) == ("tg128 @ d512", [40.0, 44.0], 2**29)
    assert (record["build_ms"], record["cpu_ms_per_token"]) == (1.0, pytest.approx(1000 / 22.5))
    assert json.loads(json_lines(made)) == record | json.loads(json.dumps(around(made)))
    [flat] = csv.DictReader(io.StringIO(as_csv(made)))
    assert (flat["tokens_per_second"], flat["depth"], flat["model"]) == ("40 44", "512", "m")


def around(made: Report) -> dict[str, object]:
    return {"machine": asdict(made.machine), "model": made.model.name, "notes": made.notes}


def test_a_comparison_says_its_ratio_and_whether_that_is_enough() -> None:
    made = report(comparisons=(COMPARED,))
    line = next(line for line in markdown(made).splitlines() if line.startswith("| pp512"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "pp512" and cells[4:] == ["1.00x", "0.50 to 1.50", "", ">= 1x", "yes"]
    assert "cortexmlx 3,000, 1.5; mlx-lm 2,000, 3 tok/s; same tokens in 1 of 2 requests" in markdown(made)
    [record] = json.loads(as_json(made))["comparisons"]
    assert (record["better"], record["ratios"], record["cpu_ratio"], record["met"]) == (">=", [1.5, 0.5], None, True)
