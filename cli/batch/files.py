"""The files that a batch writes: OUT, the file for errors, and OUT.run beside OUT."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from cortexmlx.cli.batch.resume import RunFile, RunIdentity, beside
from cortexmlx.cli.files.outputs import (
    STDOUT,
    Mode,
    check_ending,
    check_output,
    check_own,
    is_regular,
    locked,
    size_of,
    unwritten,
    written_anew,
)
from cortexmlx.cli.files.stream import RecordStream
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


class BatchFiles:
    """The files for the records of a run.

    All paths are checked before a model is loaded. Raises InvalidRequest or CortexError, each with the next step.
    Regular files are synced, resumed and put into order. Stdout, pipes and devices are only written.

    - `kept`: whether OUT is a regular file.
    - `created`: when the run first began, in seconds since 1970.
    - `done`: the keys of all existing records.
    - `failed`: the keys of the error records among them.
    """

    def __init__(self, output: Path, errors: Path | None, mode: Mode, source: str) -> None:
        for path, option in ((output, "-o"), (errors, "--errors")):
            if path is not None and path != STDOUT:
                check_output(path, option, source, mode)
                check_ending(path, option, mode)
        if errors is not None and _are_one(output, errors):
            raise InvalidRequest(f"{output} is for answers and for errors: leave out --errors, or give it another name")
        if output != STDOUT:
            check_own(output, beside(output), (Path(source), errors))
        self.kept = is_regular(output)
        if mode in (Mode.RESUME, Mode.RETRY) and not self.kept:
            raise InvalidRequest(f"{output} is no file, so there is nothing to continue: leave out --resume")
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.created = int(time.time())
        self._output = output
        self._errors = errors
        self._mode = mode
        self._read: dict[Path, RecordFile] = {}
        self._opened: list[RecordFile | RecordStream] = []
        self._run = RunFile(output) if self.kept else None

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._opened:
            file.close()
        if self._run is not None:
            self._run.close()

    def check(self, identity: RunIdentity, digests: Mapping[str, str]) -> None:
        """Read the records of the run to resume; do nothing for a new run. `digests` has a digest of each input line.

        Raises InvalidRequest if that run had other settings, or if a line has changed since its record was written.
        """
        if self._run is not None and self._goes_on:
            self.created = self._run.check(identity)
            for path in (self._output, self._errors):
                if path is not None and is_regular(path):
                    self._records(path)
            self._run.check_lines(digests, self.done, self.failed)

    def open(self, identity: RunIdentity, digests: Mapping[str, str]) -> BatchWriter:
        """Begin or resume the run, keep the digests of the input's lines, and return the writer."""
        going = self._run is not None and self._goes_on
        if self._run is not None and going:
            self.created = self._run.check(identity)
        out = self._open(self._output, anew=not going)
        writer = BatchWriter(out, out if self._errors is None else self._open(self._errors, anew=not going))
        if self._run is not None:
            if not going:
                self.created = self._run.start(identity)
            self._run.remember(digests)
        return writer

    def arrange(self, lines: Mapping[str, int]) -> None:
        """Put the records of all files into the order of the input's `lines`."""
        for file in self._opened:
            if isinstance(file, RecordFile):
                file.arrange(lines)

    @property
    def _goes_on(self) -> bool:
        going = self._mode in (Mode.RESUME, Mode.RETRY)
        return going and any(path is not None and size_of(path) > 0 for path in (self._output, self._errors))

    def _records(self, path: Path, *, anew: bool = False) -> RecordFile:
        """Return the records of a file, which is read only once."""
        if path not in self._read:
            keep = (lambda record: not record.get("error")) if self._mode is Mode.RETRY else None
            file = self._read[path] = RecordFile(path, keep, anew=anew)
            self.done.update(file.keys)
            self.failed.update(file.failed)
        return self._read[path]

    def _open(self, path: Path, *, anew: bool) -> RecordFile | RecordStream:
        if not is_regular(path):
            self._opened.append(RecordStream(None if path == STDOUT else path))
            return self._opened[-1]
        file = self._records(path, anew=anew)
        file.open()
        self._opened.append(file)
        return file


def _are_one(output: Path, errors: Path) -> bool:
    if STDOUT in (output, errors):
        return output == errors
    if output.exists() and errors.exists():
        return output.samefile(errors)
    return os.path.realpath(output) == os.path.realpath(errors)
