"""`cortexmlx doctor --report`: one file with all that helps to understand a machine, and nothing about its user."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cortexmlx.cli.doctor.check import Check
from cortexmlx.cli.doctor.impersonal import Impersonal, variables
from cortexmlx.errors import InvalidRequest

FORMAT = 1
"""The version of the file's layout."""


def check_writable(path: Path) -> None:
    """Raise InvalidRequest or OSError if a report cannot be written to a file, before anything is measured. Nothing is
    left of the attempt.
    """
    try:
        path.open("x").close()
    except FileExistsError:
        raise _exists(path) from None
    path.unlink()


def _exists(path: Path) -> InvalidRequest:
    return InvalidRequest(f"{path} exists, and a report replaces no file: remove it, or name another (--report FILE)")


def report(checks: Sequence[Check], sections: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a report."""
    names = Impersonal()
    return {
        "report": FORMAT,
        "machine": names.data(_machine()),
        "variables": names.data(variables()),
        "checks": [names.data(asdict(check)) | {"verdict": check.verdict.value} for check in checks],
        **names.data(sections),
    }


def _machine() -> dict[str, Any]:
    try:
        from cortexmlx.bench.measure.machine import Machine

        return asdict(Machine.here())
    except Exception as error:  # mlx or mlx-lm is not installed, say: the checks tell more
        return {"error": f"{type(error).__name__}: {error}"}


def write(path: Path, data: dict[str, Any]) -> int:
    """Write a report to a new file, and return its bytes. Nothing is left of a file that cannot be written whole.

    Raises InvalidRequest if the file exists, OSError if it cannot be written.
    """
    text = json.dumps(data, indent=1, ensure_ascii=True, default=str) + "\n"
    try:
        file = path.open("x", encoding="ascii")
    except FileExistsError:
        raise _exists(path) from None
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return len(text)
