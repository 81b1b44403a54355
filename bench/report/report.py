"""The outcome of one `cortexmlx bench`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.report.section import ReportSection
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import ModelInfo

GIB = 1024**3


@dataclass(frozen=True)
class Report:
    """Everything that one `cortexmlx bench` measured, with the machine and the model."""

    machine: BenchMachine
    model: ModelInfo | None
    section: ReportSection
    notes: tuple[str, ...] = ()
    """Lines that a reader must know."""
    settings: dict[str, str] = field(default_factory=dict)
    """Options of the engine that change its figures."""
    interrupted: bool = False
    """Whether something that was asked for is missing."""

    def header(self) -> list[str]:
        """Return lines about the machine, the model, and notes."""
        return [*self.machine.lines(), *model_lines(self.model), *self.notes]


def model_lines(model: ModelInfo | None) -> list[str]:
    """Return a line that describes the model, and its notes."""
    if model is None:
        return []
    count = f"{model.parameters / 1e6:,.0f} M" if model.parameters >= 1e6 else f"{model.parameters:,}"
    size = f"{count} parameters, {format_bytes(model.weight_bytes)}"
    return [f"{model.name}: {size}, {model.architecture}, {model.dtype}", *model.notes]


def as_json(report: Report) -> str:
    """Return a report as JSON text: machine, model, notes, and the section's records under its key."""
    model = None if report.model is None else asdict(report.model)
    shell = {"machine": asdict(report.machine), "model": model, "notes": report.notes, "settings": report.settings}
    rest = {"interrupted": report.interrupted, report.section.key: report.section.records}
    return json.dumps({**shell, **rest}, indent=2)
