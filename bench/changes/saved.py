"""A run in a file, for comparison with later runs."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cortexmlx.bench.measure.machine import Machine
from cortexmlx.bench.measure.pairs import Better
from cortexmlx.bench.report.formats import as_object
from cortexmlx.bench.report.report import Report
from cortexmlx.bench.report.section import Series
from cortexmlx.errors import InvalidRequest
from cortexmlx.system.files import in_place_of

FORMAT = "cortexmlx bench 2"


@dataclass(frozen=True)
class Saved:
    """The data of a run that a later run is compared with."""

    machine: Machine
    model: dict[str, str]
    """The properties of the model that figures depend on: its files and dtype. Also its name, for messages."""
    settings: dict[str, str]
    yardstick: dict[str, tuple[float, ...]]
    series: tuple[Series, ...]


def of_report(report: Report) -> Saved:
    """Return what would be saved of a report."""
    model = report.model
    known = {} if model is None else {"files": model.identity, "dtype": model.dtype, "name": model.name}
    series = tuple(series for part in report.parts for series in part.series)
    return Saved(report.machine, known, report.settings, report.yardstick, series)


def check_new(path: Path) -> None:
    """Raise InvalidRequest unless a run can be saved at `path`. It is called before anything is measured."""
    if path.exists():
        raise InvalidRequest(f"{path} exists, and a saved run is not overwritten: remove it or name another file")
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {path.parent}: make it first")
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise InvalidRequest if no file can be created in the folder of `path`."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from error


def save(report: Report, path: Path) -> None:
    """Write the report, with what `read` needs, as JSON.

    Raises OSError, also if the file exists by now. A partial file never stays.
    """
    kept = of_report(report)
    compared = {"model": kept.model, "yardstick": kept.yardstick, "series": [asdict(s) for s in kept.series]}
    text = json.dumps({"format": FORMAT, **as_object(report), "compared": compared}, indent=1) + "\n"
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with in_place_of(path) as file:
        file.write(text.encode())


def read(path: Path) -> Saved:
    """Return a saved run. Raises InvalidRequest if the file is not one, OSError if it cannot be read."""
    text = path.read_bytes()
    try:
        found = json.loads(text)
        kind = found["format"]
        if kind == FORMAT:
            return _parsed(found)
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"{path} is no run that `cortexmlx bench --save` wrote, or is damaged ({type(error).__name__}): save one"
        ) from error
    raise InvalidRequest(f"{path} was written by another version ({kind!r}, here it is {FORMAT!r}): save a new run")


def _parsed(found: Any) -> Saved:
    compared = found["compared"]
    machine = Machine(**{field.name: _of_type(field, found["machine"][field.name]) for field in fields(Machine)})
    yardstick = {name: _numbers(values) for name, values in compared["yardstick"].items()}
    if any(seconds <= 0 for values in yardstick.values() for seconds in values):
        raise ValueError("a yardstick that took no time")
    series = tuple(_series(each) for each in compared["series"])
    return Saved(machine, dict(compared["model"]), dict(found["settings"]), yardstick, series)


_TYPES: dict[Any, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


def _of_type(field: Field[Any], value: Any) -> Any:
    if not isinstance(value, _TYPES[field.type]):
        raise TypeError(f"{field.name} is {value!r}")
    return value


def _numbers(values: Any) -> tuple[float, ...]:
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError("numbers that are none")
    return tuple(values)


def _series(found: dict[str, Any]) -> Series:
    lists = {name: _numbers(found[name]) for name in ("values", "beside", "rounds")}
    series = Series(**{**found, "better": Better(found["better"]), **lists})
    texts = (series.name, series.unit, series.machine, series.clock)
    count = len(series.values)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{texts} are no texts")
    if not count or {len(series.beside), len(series.rounds)} - {0, count} or min(series.beside, default=1) <= 0:
        raise ValueError(f"lists of {series.name} do not fit together")
    return series
