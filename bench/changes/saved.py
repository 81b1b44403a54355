"""Saves a benchmark run in a file, for comparison with later runs."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.pairs import BetterDirection
from cortexmlx.bench.report.formats import as_object
from cortexmlx.bench.report.report import Report
from cortexmlx.bench.report.section import FigureSeries
from cortexmlx.errors import InvalidRequest
from cortexmlx.system.files import write_atomically

FORMAT = "cortexmlx bench 2"


@dataclass(frozen=True)
class SavedRun:
    """The data of a run that a later run is compared with."""

    machine: BenchMachine
    model: dict[str, str]
    """The properties of the model that figures depend on: its files and dtype. Also its name, for messages."""
    settings: dict[str, str]
    yardstick: dict[str, tuple[float, ...]]
    series: tuple[FigureSeries, ...]


def snapshot(report: Report) -> SavedRun:
    """Return the data of a report that a later run is compared with."""
    model = report.model
    model_properties = {} if model is None else {"files": model.identity, "dtype": model.dtype, "name": model.name}
    series = tuple(series for part in report.parts for series in part.series)
    return SavedRun(report.machine, model_properties, report.settings, report.yardstick, series)


def check_save_path(path: Path) -> None:
    """Raise InvalidRequest unless a run can be saved as a new file at `path`. Called before anything is measured."""
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


def save_run(report: Report, path: Path) -> None:
    """Write a report as JSON, with the data that a later run is compared with.

    Raises OSError, also if the file exists by now. A partial file never stays.
    """
    saved_run = snapshot(report)
    compared_data = {
        "model": saved_run.model,
        "yardstick": saved_run.yardstick,
        "series": [asdict(s) for s in saved_run.series],
    }
    text = json.dumps({"format": FORMAT, **as_object(report), "compared": compared_data}, indent=1) + "\n"
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with write_atomically(path) as file:
        file.write(text.encode())


def read_run(path: Path) -> SavedRun:
    """Return a saved run. Raises InvalidRequest if the file is not one, OSError if it cannot be read."""
    text = path.read_bytes()
    try:
        data = json.loads(text)
        kind = data["format"]
        if kind == FORMAT:
            return _parse_run(data)
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(
            f"{path} is no run that `cortexmlx bench --save` wrote, or is damaged ({type(error).__name__}): save one"
        ) from error
    raise InvalidRequest(f"{path} was written by another version ({kind!r}, here it is {FORMAT!r}): save a new run")


def _parse_run(data: Any) -> SavedRun:
    """Parse a run in JSON. Raises ValueError, OverflowError, KeyError, TypeError or AttributeError if damaged."""
    compared_data = data["compared"]
    machine = BenchMachine(
        **{field.name: _check_type(field, data["machine"][field.name]) for field in fields(BenchMachine)}
    )
    yardstick = {name: _parse_numbers(values) for name, values in compared_data["yardstick"].items()}
    if any(seconds <= 0 for values in yardstick.values() for seconds in values):
        raise ValueError("a yardstick that took no time")
    series = tuple(_parse_series(each) for each in compared_data["series"])
    return SavedRun(machine, dict(compared_data["model"]), dict(data["settings"]), yardstick, series)


_TYPES: dict[Any, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


def _check_type(field: Field[Any], value: Any) -> Any:
    """Return a value if it has the type of the dataclass field. Raises TypeError otherwise."""
    if not isinstance(value, _TYPES[field.type]):
        raise TypeError(f"{field.name} is {value!r}")
    return value


def _parse_numbers(values: Any) -> tuple[float, ...]:
    """Return values as a tuple. Raises ValueError if one is not a finite number."""
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError("numbers that are none")
    return tuple(values)


def _parse_series(data: dict[str, Any]) -> FigureSeries:
    """Return the figure's repetitions that JSON describes. Raises an error if they are inconsistent."""
    lists = {name: _parse_numbers(data[name]) for name in ("values", "beside", "rounds")}
    series = FigureSeries(**{**data, "better": BetterDirection(data["better"]), **lists})
    texts = (series.name, series.unit, series.machine, series.clock)
    count = len(series.values)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{texts} are no texts")
    if not count or {len(series.beside), len(series.rounds)} - {0, count} or min(series.beside, default=1) <= 0:
        raise ValueError(f"lists of {series.name} do not fit together")
    return series
