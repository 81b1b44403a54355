"""Write a batch: one JSON record per request. A record leaves the process at once and then reaches the disk.

A file gets the records as they finish, so that no finished record is lost however a run ends. A file in input order is
sorted when the run ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from cortexmlx.cli.files.outputs import locked, unwritten, written_anew
from cortexmlx.cli.terminal.text import to_json
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import key_of_record
from cortexmlx.protocols.request import Body
from cortexmlx.system.files import in_place_of

_REST = "what it holds stays, and with --resume the rest is asked"


class Sink(Protocol):
    """A destination of records."""

    def append(self, record: Body) -> None:
        """Take one record. From now on, it survives the end of the process."""

    def sync(self) -> None:
        """Make the records survive a power failure, too."""


class RecordFile:
    """A file of records, one per line.

    It is read at once, unless it is begun `anew`. It is not changed before `open`. A last line that was cut in half
    does not count, and neither do records that `keep` refuses. `failed` has the keys of the error records that were
    read. Raises InvalidRequest for a file with other content.
    """

    def __init__(self, path: Path, keep: Callable[[Body], bool] | None = None, *, anew: bool = False) -> None:
        self.path = Path(os.path.realpath(path))  # the target of a link is replaced
        self.failed: set[str] = set()
        self._name = path
        self._records: list[tuple[str, int, int]] = []
        self._left_out = self._read(keep) if self.path.exists() and not anew else False

    def open(self) -> None:
        """Lock the file, create it if it is missing, and remove what does not count. Raises CortexError if it cannot be
        written, InvalidRequest if another batch writes it.
        """
        try:
            self._file = locked(self._name)
            if self._left_out:
                self._replace(self._records)
                self._file.close()
                self._file = locked(self._name)
            self._file.truncate(self._size)
        except OSError as error:
            raise unwritten(str(self._name), error, "it is as it was") from error

    @property
    def keys(self) -> list[str]:
        """The keys of the records, in the order of the file."""
        return [key for key, _, _ in self._records]

    def append(self, record: Body) -> None:
        """Write one line, whole or not at all. Raises CortexError if that fails.

        A repetition of the last record is ignored: an interrupt may have come right after the first write.
        """
        key = key_of_record(record)
        assert key is not None
        if self._records and self._records[-1][0] == key:
            return
        line = to_json(record).encode() + b"\n"
        size = self._size
        try:
            written = self._file.write(line)
            while written < len(line):
                written += self._file.write(line[written:])
            self._records.append((key, size, len(line)))
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            if not isinstance(error, OSError):
                raise
            raise unwritten(str(self._name), error, _REST) from error

    def sync(self) -> None:
        """Bring the records to the disk. Raises CortexError if that fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unwritten(str(self._name), error, _REST) from error

    def arrange(self, lines: Mapping[str, int]) -> None:
        """Sort the records by `lines`, which has the input line of each key. Records with other keys come last. Raises
        CortexError if the file cannot be replaced.
        """
        ordered = sorted(self._records, key=lambda each: lines.get(each[0], sys.maxsize))
        if ordered == self._records:
            return
        try:
            self._replace(ordered)
        except OSError as error:
            then = "and --resume puts them into order"
            if error.errno == errno.EBUSY:
                then = "and stays so: a file that is mounted by itself is never replaced, so mount its folder"
            whole = f"it holds every record in the order in which they finished, {then}"
            raise unwritten(f"{self._name} in the order of the input", error, whole) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def _size(self) -> int:
        """The end of the last record, in bytes."""
        return sum(self._records[-1][1:]) if self._records else 0

    def _read(self, keep: Callable[[Body], bool] | None) -> bool:
        """Find the records of the file. Return whether `keep` refuses some of them."""
        left_out, place = False, 0
        with self.path.open("rb") as file:
            for number, (line, record) in enumerate(_whole_lines(file), 1):
                start, place = place, place + len(line)
                if record is None or (key := key_of_record(record)) is None:
                    raise InvalidRequest(f"line {number} of {self._name} is no record of a batch: --force starts again")
                if keep is not None and not keep(record):
                    left_out = True
                    continue
                self._records.append((key, start, len(line)))
                if record.get("error"):
                    self.failed.add(key)
        return left_out

    def _replace(self, records: Sequence[tuple[str, int, int]]) -> None:
        """Replace the file by one with these of its records. At every moment, either the old or the new file is
        there.
        """
        placed, place = [], 0
        with self.path.open("rb") as old, in_place_of(self.path, beside=written_anew(self.path)) as file:
            for key, start, length in records:
                old.seek(start)
                file.write(old.read(length))
                placed.append((key, place, length))
                place += length
        self._records = placed


class BatchWriter:
    """A writer of answers to `out` and of errors to `errors`, which may be the same."""

    def __init__(self, out: Sink, errors: Sink) -> None:
        self._out = out
        self._errors = errors

    def write(self, record: Body) -> None:
        """Take one record."""
        (self._errors if record.get("error") else self._out).append(record)

    def sync(self) -> None:
        """Bring the records to the disk."""
        self._out.sync()
        if self._errors is not self._out:
            self._errors.sync()


def _whole_lines(file: BinaryIO) -> Iterator[tuple[bytes, Body | None]]:
    """Yield the lines of a file, each with its JSON object or None. A last line that was cut in half is left out."""
    held: bytes | None = None
    for line in file:
        if held is not None:
            yield held, _object(held)
        held = line
    if held is not None and held.endswith(b"\n") and (record := _object(held)) is not None:
        yield held, record


def _object(line: bytes) -> Body | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
