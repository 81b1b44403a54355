"""Writes a report for programs: JSON, JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from cortexmlx.bench.report.report import Report


def as_object(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object: machine, model, notes, and the section's records under its key."""
    model = None if report.model is None else asdict(report.model)
    shell = {"machine": asdict(report.machine), "model": model, "notes": report.notes, "settings": report.settings}
    return {**shell, "interrupted": report.interrupted, report.section.key: report.section.records}


def as_json(report: Report) -> str:
    """Return a report as JSON text."""
    return json.dumps(as_object(report), indent=2)


def as_json_lines(report: Report) -> str:
    """Return a JSON object per record, one a line, each with machine and model."""
    around = {"machine": asdict(report.machine), "model": _model_name(report), "notes": report.notes}
    return "\n".join(json.dumps({**record, **around}) for record in report.section.records)


def as_csv(report: Report) -> str:
    """Return a report as CSV, a line per record. Lists are joined by spaces."""
    around = {"model": _model_name(report), "chip": report.machine.chip, "blas": report.machine.blas}
    records = [{**record, **around} for record in report.section.records]
    buffer = io.StringIO()
    writer = csv.DictWriter(
        buffer, list(dict.fromkeys(key for record in records for key in record)), lineterminator="\n"
    )
    writer.writeheader()
    for record in records:
        flat = {k: " ".join(f"{x:.6g}" for x in v) if isinstance(v, (list, tuple)) else v for k, v in record.items()}
        writer.writerow(flat)
    return buffer.getvalue().rstrip("\n")


def _model_name(report: Report) -> str | None:
    return None if report.model is None else report.model.name
