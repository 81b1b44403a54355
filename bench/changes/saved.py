"""A run in a file, to be compared with later ones."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.measure.pairs import Better
from cortexmlx.bench.report.formats import as_object
from cortexmlx.bench.report.part import Series
from cortexmlx.bench.report.report import Report
from cortexmlx.errors import InvalidRequest
from cortexmlx.host.files import in_place_of

FORMAT = "cortexmlx bench 1"


@dataclass(frozen=True)
class Saved:
    """What a later run is compared with. `model` is what the figures depend on of it."""

    machine: Machine
    model: dict[str, str]
    settings: dict[str, str]
    yardstick: dict[str, tuple[float, ...]]
    series: tuple[Series, ...]


def of_report(report: Report) -> Saved:
    """A report as it would be saved."""
    model = report.model
    known = {} if model is None else {"files": model.identity, "dtype": model.dtype, "name": model.name}
    series = tuple(series for part in report.parts for series in part.series)
    return Saved(report.machine, known, report.settings, report.yardstick, series)


def check_new(path: Path) -> None:
    """Raise InvalidRequest unless a run can be saved there: before anything is measured."""
    if path.exists():
        raise InvalidRequest(f"{path} exists, and a saved run is not overwritten: remove it or name another file")
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent}: make it first")


def save(report: Report, path: Path) -> None:
    """Write the report, with what `read` needs, as JSON."""
    kept = of_report(report)
    compared = {"model": kept.model, "yardstick": kept.yardstick, "series": [asdict(s) for s in kept.series]}
    text = json.dumps({"format": FORMAT, **as_object(report), "compared": compared}, indent=1) + "\n"
    with in_place_of(path) as file:
        file.write(text.encode())


def read(path: Path) -> Saved:
    """A saved run. Raises InvalidRequest if the file is none, OSError if it cannot be read."""
    text = path.read_bytes()
    try:
        return _parsed(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f"{path} is no run that this version's `cortexmlx bench --save` wrote ({type(error).__name__}): save one"
        ) from error


def _parsed(found: Any) -> Saved:
    if found["format"] != FORMAT:
        raise ValueError(found["format"])
    compared = found["compared"]
    machine = Machine(**{field.name: found["machine"][field.name] for field in fields(Machine)})
    yardstick = {name: tuple(values) for name, values in compared["yardstick"].items()}
    series = tuple(_series(each) for each in compared["series"])
    return Saved(machine, dict(compared["model"]), dict(found["settings"]), yardstick, series)


def _series(found: dict[str, Any]) -> Series:
    return Series(**{**found, "better": Better(found["better"]), "values": tuple(found["values"])})
