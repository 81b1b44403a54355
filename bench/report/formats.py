"""Writes a report for programs: JSON."""

from __future__ import annotations

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
