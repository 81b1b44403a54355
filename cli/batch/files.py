"""The files that a batch writes: OUT, the file for errors, and OUT.run beside OUT."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from cortexmlx.cli.batch.resume import BatchRunFile, RunIdentity, side_paths
from cortexmlx.cli.files.outputs import (
    STDOUT,
    ExistingFileMode,
    check_batch_output,
    check_side_files,
    descriptor_of,
    file_size,
    is_regular,
    open_locked,
    rewrite_path,
    write_error,
)
from cortexmlx.cli.limits import FORM_CUT
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.text import to_json
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import record_key
from cortexmlx.protocols.request import Body
from cortexmlx.system.files import write_atomically

_REST = "what it holds stays, and with --resume the rest is asked"


class RecordFile:
    """A file of JSON records, one per line, locked by the run that writes it.

    It is read at once, unless it is begun `is_new`. It is not changed before `open`. A last line that was cut in half
    does not count, and neither do records that `keep` refuses. `failed_keys` has the keys of the error records that
    were read. Raises InvalidRequest for a file with other content.
    """

    def __init__(self, path: Path, keep: Callable[[Body], bool] | None = None, *, is_new: bool = False) -> None:
        self.path = Path(os.path.realpath(path))  # the target of a link is replaced
        self.failed_keys: set[str] = set()
        self._name = path
        self._records: list[tuple[str, int, int]] = []
        self._left_out = self._index_records(keep) if self.path.exists() and not is_new else False

    def open(self) -> None:
        """Lock the file, create it if missing, and remove an incomplete last line and the records that `keep` refuses.
        Raises CortexError if it cannot be written, InvalidRequest if another batch writes it.
        """
        try:
            self._file = open_locked(self._name)
            if self._left_out:
                self._rewrite(self._records)
                self._file.close()
                self._file = open_locked(self._name)
            self._file.truncate(self._end_offset)
        except OSError as error:
            raise write_error(str(self._name), error, "it is as it was") from error

    @property
    def keys(self) -> list[str]:
        """The keys of the records, in file order."""
        return [key for key, _, _ in self._records]

    def append(self, record: Body) -> None:
        """Append one record as a line, whole or not at all. Raises CortexError if that fails.

        A repetition of the last record is ignored: an interrupt may have come right after the first write.
        """
        key = record_key(record)
        assert key is not None
        if self._records and self._records[-1][0] == key:
            return
        line = to_json(record).encode() + b"\n"
        size = self._end_offset
        try:
            written_count = self._file.write(line)
            while written_count < len(line):
                written_count += self._file.write(line[written_count:])
            self._records.append((key, size, len(line)))
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end_offset)
            if not isinstance(error, OSError):
                raise
            raise write_error(str(self._name), error, _REST) from error

    def sync(self) -> None:
        """Flush the records to the disk. Raises CortexError if that fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(str(self._name), error, _REST) from error

    def sort_records(self, lines: Mapping[str, int]) -> None:
        """Sort records by their line in `lines`, unknown last. Raises CortexError if the file cannot be replaced."""
        sorted_records = sorted(self._records, key=lambda each: lines.get(each[0], sys.maxsize))
        if sorted_records == self._records:
            return
        try:
            self._rewrite(sorted_records)
        except OSError as error:
            order_note = "and --resume puts them into order"
            if error.errno == errno.EBUSY:
                order_note = "and stays so: a file that is mounted by itself is never replaced, so mount its folder"
            state_note = f"it holds every record in the order in which they finished, {order_note}"
            raise write_error(f"{self._name} in the order of the input", error, state_note) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def _end_offset(self) -> int:
        """The byte offset of the end of the last record."""
        return sum(self._records[-1][1:]) if self._records else 0

    def _index_records(self, keep: Callable[[Body], bool] | None) -> bool:
        """Find the offset of each record. Return whether `keep` rejects some of them."""
        has_rejected, offset = False, 0
        with self.path.open("rb") as file:
            for number, (line, record) in enumerate(_complete_lines(file), 1):
                start, offset = offset, offset + len(line)
                if record is None or (key := record_key(record)) is None:
                    raise InvalidRequest(f"line {number} of {self._name} is no record of a batch: --force starts again")
                if keep is not None and not keep(record):
                    has_rejected = True
                    continue
                self._records.append((key, start, len(line)))
                if record.get("error"):
                    self.failed_keys.add(key)
        return has_rejected

    def _rewrite(self, records: Sequence[tuple[str, int, int]]) -> None:
        """Replace the file by one with these of its records, in this order. An interrupt leaves the old file."""
        new_records, offset = [], 0
        with self.path.open("rb") as old_file, write_atomically(self.path, temp_path=rewrite_path(self.path)) as file:
            for key, start, length in records:
                old_file.seek(start)
                file.write(old_file.read(length))
                new_records.append((key, offset, length))
                offset += length
        self._records = new_records


def is_cut(value: object) -> bool:
    """Return whether a record, or an answer in it, has a note that it ends before its form is whole."""
    if not isinstance(value, dict):
        return isinstance(value, list) and any(map(is_cut, value))
    return any(FORM_CUT in str(note) for note in value.get("notes") or ()) or any(map(is_cut, value.values()))


class BatchWriter:
    """Writes answers to `output` and failed requests to `errors`, which may be the same file."""

    def __init__(self, output: RecordFile | RecordStream, errors: RecordFile | RecordStream) -> None:
        self._output = output
        self._errors = errors

    def write(self, record: Body) -> None:
        """Append a record to the output or to the error file."""
        (self._errors if record.get("error") else self._output).append(record)

    def sync(self) -> None:
        """Flush both files to the disk."""
        self._output.sync()
        if self._errors is not self._output:
            self._errors.sync()


def _complete_lines(file: BinaryIO) -> Iterator[tuple[bytes, Body | None]]:
    """Yield each line of a file with its JSON object, or with None if it is no object. Leave the last line out unless
    it is an object and ends with a line break.
    """
    previous_line = b""
    for line in file:
        if previous_line:
            yield previous_line, _parse_object(previous_line)
        previous_line = line
    if previous_line.endswith(b"\n") and (record := _parse_object(previous_line)) is not None:
        yield previous_line, record


def _parse_object(line: bytes) -> Body | None:
    """Return the JSON object of a line, or None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class BatchFiles:
    """The output, error and run files of one batch run: checks, opens and sorts them.

    All paths are checked before a model is loaded. Raises InvalidRequest or CortexError, each with the next step.
    Regular files are synced, resumed and put into order. Stdout, pipes and devices are only written.

    - `is_regular_file`: whether OUT is a regular file.
    - `created`: when the run first began, in seconds since 1970.
    - `done_keys`: the keys of all existing records.
    - `failed_keys`: the keys of the error records among them.
    - `error_name`: what takes error records.
    """

    def __init__(self, output: Path, errors: Path | None, mode: ExistingFileMode, source: str) -> None:
        for path, option in ((output, "-o"), (errors, "--errors")):
            if path is not None and path != STDOUT:
                check_batch_output(path, option, source, mode)
        if errors is not None and _is_same_file(output, errors):
            raise InvalidRequest(f"{output} is for answers and for errors: leave out --errors, or give it another name")
        if output != STDOUT:
            check_side_files(output, side_paths(output), (Path(source), errors))
        self.is_regular_file = is_regular(output)
        self.done_keys: set[str] = set()
        self.failed_keys: set[str] = set()
        self.created = int(time.time())
        self.error_name = "stdout" if (errors or output) == STDOUT else str(errors or output)
        self._output = output
        self._errors = errors
        self._is_retry = mode is ExistingFileMode.RETRY
        self._wants_resume = self._is_retry or mode is ExistingFileMode.RESUME
        if self._wants_resume and not self.is_regular_file:
            raise InvalidRequest(f"{output} is no file, so there is nothing to continue: leave out --resume")
        self._read: dict[Path, RecordFile] = {}
        self._open_files: list[RecordFile | RecordStream] = []
        self._run = BatchRunFile(output) if self.is_regular_file else None

    def __enter__(self) -> BatchFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._open_files:
            file.close()
        if self._run is not None:
            self._run.close()

    def check(self, identity: RunIdentity, digests: Mapping[str, str]) -> None:
        """Read the records of the run to resume, and check its settings and input lines; do nothing for a new run.
        `digests` has a digest of each input line.

        Raises InvalidRequest if that run had other settings, or if a line has changed since its record was written.
        """
        if self._run is not None and self._is_resumed:
            self.created = self._run.check_settings(identity, is_retry=self._is_retry)
            for path in (self._output, self._errors):
                if path is not None and is_regular(path):
                    self._record_file(path)
            self._run.check_lines(identity.source, digests, self.done_keys, self.failed_keys)
            self._note_old_errors(self._run.read_settings().get("errors"))

    def open(self, identity: RunIdentity, digests: Mapping[str, str]) -> BatchWriter:
        """Begin or resume the run, save the digests of the input lines, and return the writer."""
        if (is_resumed := self._is_resumed) and self._run is not None:
            self.created = self._run.check_settings(identity, is_retry=self._is_retry)
        output_sink = self._open_sink(self._output, is_new=not is_resumed)
        writer = BatchWriter(
            output_sink, output_sink if self._errors is None else self._open_sink(self._errors, is_new=not is_resumed)
        )
        if self._run is not None:
            if not is_resumed:
                self.created = self._run.start(identity)
            self._run.save_digests(digests)
        return writer

    def sort_records(self, lines: Mapping[str, int]) -> None:
        """Sort the records of all files into input order: `lines` maps each key to its line."""
        for file in self._open_files:
            if isinstance(file, RecordFile):
                file.sort_records(lines)

    @property
    def _is_resumed(self) -> bool:
        """Whether this run continues files that have records already."""
        return self._wants_resume and any(
            path is not None and file_size(path) > 0 for path in (self._output, self._errors)
        )

    def _note_old_errors(self, errors: str | None) -> None:
        """Say what is asked again since its record is only in the file for errors that an earlier run had."""
        if errors is None or errors in [str(file.path) for file in self._read.values()]:
            return
        with contextlib.suppress(OSError, InvalidRequest):  # it is another file by now
            if count := len(set(RecordFile(Path(errors)).keys) - self.done_keys):
                subject = "1 request that failed: it is" if count == 1 else f"{count} requests that failed: they are"
                console.print_note(f"{errors} has records of {subject} asked again")

    def _is_kept(self, path: Path, record: Body) -> bool:
        """Return whether the record of a request stays in a file. One that does not is asked again."""
        if self._is_retry and (record.get("error") or is_cut(record)):
            return False
        if path == self._output:
            return self._errors is None or not record.get("error")
        return record_key(record) not in self.done_keys  # it was answered since it failed

    def _record_file(self, path: Path, *, is_new: bool = False) -> RecordFile:
        """Return the `RecordFile` of a path, reading the file only once."""
        if path not in self._read:
            file = self._read[path] = RecordFile(path, partial(self._is_kept, path), is_new=is_new)
            self.done_keys.update(file.keys)
            self.failed_keys.update(file.failed_keys)
        return self._read[path]

    def _open_sink(self, path: Path, *, is_new: bool) -> RecordFile | RecordStream:
        """Open a record file, or a stream for stdout, a pipe or a device."""
        if not is_regular(path):
            self._open_files.append(RecordStream(None if path == STDOUT else path))
            return self._open_files[-1]
        file = self._record_file(path, is_new=is_new)
        file.open()
        self._open_files.append(file)
        return file


def _is_same_file(output: Path, errors: Path) -> bool:
    """Return whether both paths lead to the same file."""
    if STDOUT in (output, errors):
        return output == errors
    if output.exists() and errors.exists():
        return output.samefile(errors)
    return os.path.realpath(output) == os.path.realpath(errors)


# Records that are written immediately to stdout, a pipe or a device.


class RecordStream:
    """Writes each record immediately to a pipe, a device or, without a path, to stdout."""

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
