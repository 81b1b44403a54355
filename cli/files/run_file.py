"""OUT.run, beside OUT: the settings of the run that writes OUT, and what it notes on the way to be resumed."""

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
    """Return the path of OUT.run. If OUT is a link, it is beside its target, as the records are."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + ".run")


class LockedRun:
    """OUT.run, locked by one run at a time. Its first line has the settings of the run. `what` names the kind of run in
    messages. Raises CortexError if it cannot be written, InvalidRequest if another run has it.
    """

    def __init__(self, output: Path, what: str) -> None:
        self.path = run_path(output)
        self._output = output
        try:
            self._file = self.path.open("a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(f"another {what} is writing {output}: wait for it, or give -o another name") from None
        except OSError as error:
            raise CortexError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, with the time of its beginning as `created`, in seconds since 1970. Raises
        InvalidRequest if they cannot be read.
        """
        self._file.seek(0)
        try:
            before = json.loads(self._file.readline())
            before["created"] = int(before["created"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise self.unknown() from None
        return dict(before)

    def unknown(self) -> InvalidRequest:
        """Return the error of a run whose settings cannot be read."""
        return InvalidRequest(
            f"{self.path} is missing, so it is not known what {self._output.name} holds: --force starts again"
        )

    def begin(self, settings: Mapping[str, Any]) -> int:
        """Begin a new run and keep its settings. Return the time, in seconds since 1970."""
        created = int(time.time())
        self._file.truncate(0)
        self.append({**settings, "created": created})
        return created

    def entries(self) -> Iterator[Any]:
        """Yield what was appended after the settings. A line that was cut in half is left out."""
        self._file.seek(0)
        for line in self._file.read().split(b"\n")[1:]:  # unbuffered: `readlines` would read byte by byte
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def append(self, values: Mapping[str, Any], before: bytes = b"") -> None:
        """Append a line, after the bytes `before`. Raises CortexError if that fails."""
        data = memoryview(before + json.dumps(values).encode() + b"\n")
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
