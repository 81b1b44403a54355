"""JSONL of embeddings: a record in each line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from cortexmlx.cli.embed.rows import EmbeddingRow, row_record
from cortexmlx.cli.files.outputs import open_locked, write_error
from cortexmlx.cli.files.stream import RecordStream
from cortexmlx.cli.terminal.text import to_json
from cortexmlx.errors import InvalidRequest

_KEPT = "what it holds stays, and --resume goes on"


class JsonlRowFile:
    """A JSONL file with one embedding record per line. An existing file is read on construction, unless `overwrite`,
    and not changed before `open`.

    Lines at its end that are no whole records do not count: a process that is killed leaves them, or a machine without
    power. Raises InvalidRequest for such a line before a whole one.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.count = 0
        self.failed = 0
        self._path = path
        self._size = 0
        if not overwrite and path.is_file():
            self._count_records()

    def open(self, dimensions: int | None) -> None:
        """Lock the file, create it if missing, and cut off what is no whole record at its end. Raises CortexError."""
        try:
            self._file = open_locked(self._path, "embed")
            self._file.truncate(self._size)
        except OSError as error:
            raise write_error(str(self._path), error, "it is as it was") from error

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows and flush them to the disk. Raises CortexError."""
        data = b"".join(to_json(row_record(row)).encode() + b"\n" for row in rows)
        try:
            written_bytes = self._file.write(data)
            while written_bytes < len(data):
                written_bytes += self._file.write(data[written_bytes:])
            os.fsync(self._file.fileno())
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            if not isinstance(error, OSError):
                raise
            raise write_error(str(self._path), error, _KEPT) from error
        self._size += len(data)
        self.count += len(rows)
        self.failed += sum(row.vector is None for row in rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _count_records(self) -> None:
        """Count the whole records of the existing file. Raises InvalidRequest for any other line before one."""
        broken_line = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not (line.startswith(b'{"id": ') and line.endswith(b"}\n")):
                    broken_line = broken_line or number
                    continue
                if broken_line:
                    raise InvalidRequest(
                        f"line {broken_line} of {self._path} is no record of embed: --force starts again"
                    )
                self._size += len(line)
                self.count += 1
                self.failed += b'"embedding": ' not in line


class RowStream:
    """Embedding records written to stdout (None), a pipe or a device."""

    def __init__(self, path: Path | None) -> None:
        self.count = 0
        self.failed = 0
        self._stream = RecordStream(path)

    def open(self, dimensions: int | None) -> None:
        """Do nothing: the stream is open already."""

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows as JSON lines. Raises CortexError if that fails, BrokenPipeError if nobody reads."""
        for row in rows:
            self._stream.append(row_record(row))
        self.count += len(rows)
        self.failed += sum(row.vector is None for row in rows)

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()
