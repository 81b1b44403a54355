"""The outcome of one `cortexmlx bench`."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.report.section import ReportSection
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.stats import ModelInfo

GIB = 1024**3


@dataclass(frozen=True)
class Report:
    """Everything that was measured. `settings` are options of the engine that change its figures; `yardstick` the
    seconds that fixed pieces of work took beside it, by clock and part of the machine; `notes` lines that a reader must
    know; `interrupted` if not all that was asked for is there.
    """

    machine: Machine
    model: ModelInfo | None
    parts: tuple[ReportSection, ...] = ()
    notes: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    yardstick: dict[str, tuple[float, ...]] = field(default_factory=dict)
    interrupted: bool = False

    def header(self) -> list[str]:
        """Machine, model and notes, one item each."""
        return [*self.machine.lines(), *model_lines(self.model), *self.notes]


def model_lines(model: ModelInfo | None) -> list[str]:
    """The model in a line, and what was done to it."""
    if model is None:
        return []
    count = f"{model.parameters / 1e6:,.0f} M" if model.parameters >= 1e6 else f"{model.parameters:,}"
    size = f"{count} parameters, {format_bytes(model.weight_bytes)}"
    return [f"{model.name}: {size}, {model.architecture}, {model.dtype}", *model.notes]
