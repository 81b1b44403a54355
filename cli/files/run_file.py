"""OUT.run, next to OUT: the settings of the run that writes OUT, and what a later run needs to resume it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, InvalidRequest


def run_path(output: Path) -> Path:
    """Return the path of OUT.run. If OUT is a link, it is next to the link's target, as the records are."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + ".run")


class LockedRunFile:
    """OUT.run, locked by one run at a time. Its first line has the run's settings. `run_kind` names the kind of run in
    messages. Raises CortexError if it cannot be written, InvalidRequest if another run has locked it.
    """

    def __init__(self, output: Path, run_kind: str) -> None:
        self.path = run_path(output)
        self._output = output
        try:
            self._file = self.path.open("a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(
                f"another {run_kind} is writing {output}: wait for it, or give -o another name"
            ) from None
        except OSError as error:
            raise CortexError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def read_settings(self) -> dict[str, Any]:
        """Return the run's settings, with its start as `created` (Unix time). Raises InvalidRequest if unreadable."""
        self._file.seek(0)
        try:
            settings = json.loads(self._file.readline())
            settings["created"] = int(settings["created"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise self.unreadable_error() from None
        return dict(settings)

    def unreadable_error(self) -> InvalidRequest:
        """Return the error for a run whose settings cannot be read."""
        return InvalidRequest(
            f"{self.path} is missing, so it is not known what {self._output.name} holds: --force starts again"
        )

    def start_run(self, settings: Mapping[str, Any]) -> int:
        """Begin a new run and save its settings. Return its start time, in seconds since 1970."""
        start_time = int(time.time())
        self._file.truncate(0)
        self.append({**settings, "created": start_time})
        return start_time

    def read_entries(self) -> Iterator[Any]:
        """Yield the JSON values that were appended after the settings. An incomplete line is left out."""
        self._file.seek(0)
        for line in self._file.read().split(b"\n")[1:]:  # unbuffered: `readlines` would read byte by byte
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def append(self, values: Mapping[str, Any], prefix: bytes = b"") -> None:
        """Append a JSON value as a line, after the bytes `prefix`. Raises CortexError if that fails."""
        data = memoryview(prefix + json.dumps(values).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise CortexError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Unlock the file for other runs. Delete it if no run has begun."""
        if not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)
        self._file.close()
