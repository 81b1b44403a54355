"""Records that are written immediately to stdout, a pipe or a device."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import TextIO

from cortexmlx.cli.files.outputs import descriptor_of, write_error
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.text import to_json
from cortexmlx.protocols.request import Body


class RecordStream:
    """Writes each record immediately to stdout (None), a pipe or a device."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = sys.stdout if path is None else _open_stream(path)

    def append(self, record: Body) -> None:
        """Write one record. Raises CortexError if that fails, BrokenPipeError if nobody reads."""
        try:
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise write_error(str(self._path or "stdout"), error, "it has all that was finished before") from error

    def sync(self) -> None:
        """Do nothing: the reader has every record already."""

    def close(self) -> None:
        """Close the pipe or the device. Stdout stays open."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # a full disk; `append` has raised the error
                self._file.close()


def _open_stream(path: Path) -> TextIO:
    """Open a pipe or a device for writing. Opening a pipe waits for a reader, and a note says so.

    A path that names an open descriptor is written from the descriptor's position on.
    """
    if (open_descriptor := descriptor_of(path)) is not None:
        return os.fdopen(os.dup(open_descriptor), "w", encoding="utf-8")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        console.print_note(f"waiting for somebody to read {path} ...")
        descriptor = os.open(path, flags)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "w", encoding="utf-8")
