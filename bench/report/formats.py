"""A report for programs: JSON, JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cortexmlx.bench.report.report import Report


def as_object(report: Report) -> dict[str, Any]:
    """Return machine, model, notes, and the records of each part under its key."""
    model = None if report.model is None else asdict(report.model)
    shell = {"machine": asdict(report.machine), "model": model, "notes": report.notes, "settings": report.settings}
    return {**shell, "interrupted": report.interrupted, **{part.key: part.records for part in report.parts}}


def as_json(report: Report) -> str:
    """Return one JSON object."""
    return json.dumps(as_object(report), indent=2)


def json_lines(report: Report) -> str:
    """Return one object per record, each with machine and model."""
    around = {"machine": asdict(report.machine), "model": _name(report), "notes": report.notes}
    return "\n".join(json.dumps({**record, **around}) for record in _records(report))


def as_csv(report: Report) -> str:
    """Return one line per record. Lists are joined by spaces."""
    around = {"model": _name(report), "chip": report.machine.chip, "blas": report.machine.blas}
    records = [{**record, **around} for record in _records(report)]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for record in records for key in record)), lineterminator="\n")
    writer.writeheader()
    for record in records:
        flat = {k: " ".join(f"{x:.6g}" for x in v) if isinstance(v, (list, tuple)) else v for k, v in record.items()}
        writer.writerow(flat)
    return out.getvalue().rstrip("\n")


def _name(report: Report) -> str | None:
    return None if report.model is None else report.model.name


def _records(report: Report) -> list[Mapping[str, Any]]:
    """Return all records. With several parts, each record has the key of its part."""
    several = len(report.parts) > 1
    return [{"part": part.key, **record} if several else record for part in report.parts for record in part.records]
