"""A report for programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from cortexmlx.bench.report import speed
from cortexmlx.bench.report.report import as_json
from support.cli.bench_reports import MODEL, ROW, report


def test_json_has_every_record_with_the_machine_and_the_model() -> None:
    made = report(speed.speed_section([ROW], MODEL, "CPU"))
    written = json.loads(as_json(made))
    [record] = written["rows"]
    assert (record["test"], record["tokens_per_second"], record["kv_bytes"]) == ("tg128 @ d512", [40.0, 44.0], 2**29)
    assert written["machine"] == asdict(made.machine) and written["model"]["name"] == "m"
    assert written["notes"] == ["another"]
