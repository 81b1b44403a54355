"""`cortexmlx doctor --report`: one file with all that helps to understand a machine, and nothing about its user."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cortexmlx.cli.doctor.check import Check
from cortexmlx.errors import InvalidRequest
from cortexmlx.system.files import home_folder

_PATH = re.compile(r"(?<![\w./~>-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\:'\",;()<>]+[/\\])+[^\s/\\:'\",;()<>]*")
"""An absolute path of two or more parts."""

_QUOTED = re.compile(r"""(['"])(?:~|[A-Za-z]:)?[/\\](?:(?!\1)[^\n]){2,}\1""")
"""An absolute path in quotes, as in Python's errors. It may have spaces."""

_PLAIN = re.compile(r"[-+\w.]{1,20}")
"""Values of variables that are told: numbers and words."""


class Impersonal:
    """Replaces the user's and the host's names, and all paths, in texts."""

    def __init__(self) -> None:
        paths = sorted({p for p in _paths() if len(p) > 1}, key=len, reverse=True)
        self._known = re.compile(rf"(?:{'|'.join(map(re.escape, paths)) or '(?!)'})(?:[/\\][^\s'\",;()<>]*)?")
        words = "|".join(map(re.escape, sorted(set(_names()), key=len, reverse=True))) or "(?!)"
        self._words = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return a text without names and paths."""
        text = _QUOTED.sub(r"\1<path>\1", text)
        return self._words.sub("<name>", _PATH.sub("<path>", self._known.sub("<path>", text)))

    def data(self, value: Any) -> Any:
        """Return data of JSON with all of its texts changed, those of keys excepted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {str(key): self.data(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.data(each) for each in value]
        return value if value is None or isinstance(value, (bool, int, float)) else self.text(str(value))


def _paths() -> Iterator[str]:
    places = [home_folder(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(sys.base_prefix)]
    with suppress(OSError):  # somebody has removed it
        places.append(Path.cwd())
    for path in places:
        yield from (str(path), os.path.realpath(path))
    for name, value in os.environ.items():
        if name.endswith(("_HOME", "_CACHE", "_PATH", "_STORE", "_DIR")) and os.path.isabs(value):
            yield value


def _names() -> Iterator[str]:
    """Yield the names by which the user and the host are known; parts of them, too."""
    found = [platform.node(), platform.node().partition(".")[0], home_folder().name, os.environ.get("USER", "")]
    try:
        found.append(getpass.getuser())
        import pwd

        whole = pwd.getpwuid(os.getuid()).pw_gecos.partition(",")[0]
        found += [whole, *whole.split()]
    except (ImportError, KeyError, OSError):  # a system, or a container, that does not name its users
        pass
    yield from (name for name in found if len(name) > 2)


def variables() -> dict[str, str]:
    """Return the variables of the environment that change what runs, with those values that are numbers or words."""
    wanted = ("MLX_", "CORTEXMLX_", "OPENBLAS_", "OMP_", "METAL_", "MTL_")
    hidden = ("KEY", "TOKEN", "SECRET")
    return {
        name: value if _PLAIN.fullmatch(value) and not any(word in name for word in hidden) else "<set>"
        for name, value in sorted(os.environ.items())
        if name.startswith(wanted)
    }


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
