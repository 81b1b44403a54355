"""A report for programs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict

from cortexmlx.bench.report import speed
from cortexmlx.bench.report.formats import as_csv, as_json, as_json_lines
from support.cli.bench_reports import MODEL, ROW, report


def test_json_json_lines_and_csv_hold_the_same_record() -> None:
    made = report(speed.speed_section([ROW], MODEL, "CPU"))
    [record] = json.loads(as_json(made))["rows"]
    assert (record["test"], record["tokens_per_second"], record["kv_bytes"]) == ("tg128 @ d512", [40.0, 44.0], 2**29)
    around = {"machine": asdict(made.machine), "model": "m", "notes": ["another"]}
    assert json.loads(as_json_lines(made)) == record | around
    [flat] = csv.DictReader(io.StringIO(as_csv(made)))
    assert (flat["tokens_per_second"], flat["depth"], flat["model"]) == ("40 44", "512", "m")
