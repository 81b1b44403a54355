"""`cortexmlx doctor --report`: one file with the facts about a machine, and nothing personal."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.system.files import home_folder


class CheckStatus(str, Enum):
    """The result of a check: ok, warn or fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the report of `cortexmlx doctor`: its result and what to do."""

    name: str
    """What was checked."""
    verdict: CheckStatus
    detail: str
    """What was found."""
    advice: str = ""
    """What to do about it; empty for nothing."""
    message: str = ""
    """The whole text of a compiler or a library. Only `--json` shows it."""


_PATH = re.compile(r"(?<![\w./~>-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\:'\",;()<>]+[/\\])+[^\s/\\:'\",;()<>]*")
"""An absolute path of two or more parts."""

_QUOTED_PATH = re.compile(r"""(['"])(?:~|[A-Za-z]:)?[/\\](?:(?!\1)[^\n]){2,}\1""")
"""An absolute path in quotes, as in Python's errors. It may have spaces."""

_PLAIN_VALUE = re.compile(r"[-+\w.]{1,20}")
"""Values of variables that are told: numbers and words."""


class Anonymizer:
    """Replaces the user's and the host's names, and all paths, in texts."""

    def __init__(self) -> None:
        paths = sorted({p for p in _personal_paths() if len(p) > 1}, key=len, reverse=True)
        self._path_pattern = re.compile(rf"(?:{'|'.join(map(re.escape, paths)) or '(?!)'})(?:[/\\][^\s'\",;()<>]*)?")
        name_alternatives = "|".join(map(re.escape, sorted(set(_personal_names()), key=len, reverse=True))) or "(?!)"
        self._name_pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{name_alternatives})(?![A-Za-z0-9])", re.IGNORECASE)

    def anonymize_text(self, text: str) -> str:
        """Return a text without names and paths."""
        text = _QUOTED_PATH.sub(r"\1<path>\1", text)
        return self._name_pattern.sub("<name>", _PATH.sub("<path>", self._path_pattern.sub("<path>", text)))

    def anonymize_data(self, value: Any) -> Any:
        """Return JSON data with all of its texts anonymized, except keys."""
        if isinstance(value, str):
            return self.anonymize_text(value)
        if isinstance(value, Mapping):
            return {str(key): self.anonymize_data(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.anonymize_data(each) for each in value]
        return value if value is None or isinstance(value, (bool, int, float)) else self.anonymize_text(str(value))


def _personal_paths() -> Iterator[str]:
    """Yield the folders whose paths may name the user."""
    paths = [home_folder(), Path(tempfile.gettempdir()), Path(sys.prefix), Path(sys.base_prefix)]
    with suppress(OSError):  # somebody has removed it
        paths.append(Path.cwd())
    for path in paths:
        yield from (str(path), os.path.realpath(path))
    for name, value in os.environ.items():
        if name.endswith(("_HOME", "_CACHE", "_PATH", "_STORE", "_DIR")) and os.path.isabs(value):
            yield value


def _personal_names() -> Iterator[str]:
    """Yield the names of the user and the host, and parts of them."""
    names = [platform.node(), platform.node().partition(".")[0], home_folder().name, os.environ.get("USER", "")]
    try:
        names.append(getpass.getuser())
        import pwd

        full_name = pwd.getpwuid(os.getuid()).pw_gecos.partition(",")[0]
        names += [full_name, *full_name.split()]
    except (ImportError, KeyError, OSError):  # a system, or a container, that does not name its users
        pass
    yield from (name for name in names if len(name) > 2)


def safe_environment() -> dict[str, str]:
    """Return environment variables that affect a run. Secrets and all but numbers and single words become `<set>`."""
    prefixes = ("MLX_", "CORTEXMLX_", "OPENBLAS_", "OMP_", "METAL_", "MTL_")
    secret_words = ("KEY", "TOKEN", "SECRET")
    return {
        name: value if _PLAIN_VALUE.fullmatch(value) and not any(word in name for word in secret_words) else "<set>"
        for name, value in sorted(os.environ.items())
        if name.startswith(prefixes)
    }


FORMAT = 2
"""The version of the file's layout. `cortexmlx.bench.studies.first_report` reads this one."""


def check_writable(path: Path) -> None:
    """Raise InvalidRequest or OSError before measuring if this file cannot be written. Leave nothing of the attempt."""
    try:
        path.open("x").close()
    except FileExistsError:
        raise _exists_error(path) from None
    path.unlink()


def _exists_error(path: Path) -> InvalidRequest:
    """Return the error for a report file that exists already."""
    return InvalidRequest(f"{path} exists, and a report replaces no file: remove it, or name another (--report FILE)")


def make_report(checks: Sequence[DoctorCheck], sections: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a report: the checks and the given sections, anonymized."""
    names = Anonymizer()
    return {
        "report": FORMAT,
        "machine": names.anonymize_data(_facts_or_error(_machine_facts)),
        "gpu": names.anonymize_data(_facts_or_error(_gpu_facts)),
        "variables": names.anonymize_data(safe_environment()),
        "checks": [names.anonymize_data(asdict(check)) | {"verdict": check.verdict.value} for check in checks],
        **names.anonymize_data(sections),
    }


def _facts_or_error(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that `read` returns, or its error as their only entry."""
    try:
        return read()
    except Exception as error:  # mlx or mlx-lm is not installed, say: the checks tell more
        return {"error": f"{type(error).__name__}: {error}"}


def _machine_facts() -> dict[str, Any]:
    """Return the facts about the machine."""
    from cortexmlx.bench.measure.machine import BenchMachine

    return asdict(BenchMachine.detect())


def _gpu_facts() -> dict[str, Any]:
    """Return the facts about the GPU that defaults depend on."""
    from cortexmlx.system import machine

    return {
        "trusted": machine.trusts_gpu(),
        "matrix_units": machine.has_matrix_units(),
        "matrix_kernels": machine.mlx_has_matrix_kernels(),
        "working_set_bytes": machine.working_set_bytes(),
    }


def write_file(path: Path, data: dict[str, Any]) -> int:
    """Write a report to a new file, and return its size in bytes. A file that cannot be written completely is removed.

    Raises InvalidRequest if the file exists, OSError if it cannot be written.
    """
    text = json.dumps(data, indent=1, ensure_ascii=True, default=str) + "\n"
    try:
        file = path.open("x", encoding="ascii")
    except FileExistsError:
        raise _exists_error(path) from None
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return len(text)
