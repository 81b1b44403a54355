"""The files of one run of embed: OUT, and OUT.run with its settings and a digest of each text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cortexmlx.cli.embed.texts import TextLine
from cortexmlx.cli.files.outputs import (
    STDOUT,
    ExistingFileMode,
    check_extension,
    check_output,
    check_side_files,
    file_size,
    is_regular,
    open_locked,
    write_error,
)
from cortexmlx.cli.files.run_file import LockedRunFile, run_path
from cortexmlx.cli.files.stream import RecordStream
from cortexmlx.cli.terminal.text import to_json
from cortexmlx.errors import InvalidRequest
from cortexmlx.protocols.batch import INVALID_REQUEST, InvalidLine, LineStyle, error_record
from cortexmlx.protocols.openai.embeddings import encode_vector
from cortexmlx.protocols.request import Body

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class EmbeddingRow:
    """The embedding of one text, or why there is none."""

    line: TextLine
    vector: npt.NDArray[np.float32] | None
    """None: there is none."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    truncated: bool = False
    error: str = ""
    code: str = INVALID_REQUEST


class RowFile(Protocol):
    """A file that embedding rows are appended to."""

    @property
    def count(self) -> int:
        """The number of rows in the file."""

    @property
    def failed(self) -> int:
        """The number of rows without a vector."""

    def open(self, dimensions: int | None) -> None:
        """Lock the file, create it if missing, and cut off what is no whole row at its end. `dimensions` is the length
        of a vector; None: as its rows have. Raises CortexError.
        """

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows and flush them to the disk. Raises CortexError."""

    def close(self) -> None:
        """Close the file."""


def row_record(row: EmbeddingRow) -> Body:
    """Return a row as JSON, without values that differ from run to run."""
    if row.vector is None:
        return error_record(InvalidLine(row.line.number, row.line.id, LineStyle.SIMPLE, row.error), row.error, row.code)
    record: Body = {"id": row.line.id, "embedding": encode_vector(row.vector, packed=False)}
    record["prompt_tokens"] = row.prompt_tokens
    return {**record, "truncated": True} if row.truncated else record


@dataclass(frozen=True)
class EmbedSettings:
    """The settings that must be equal for a run to resume another one's file."""

    model: str
    adapter: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool = False
    kv_bits: int | None = None
    kv_group_size: int | None = None
    weights: str | None = None
    """Identity of the content of the model's files. None before they are loaded."""
    instruction: str | None = None
    """The text before each text. None before the model is loaded."""
    longest_text: int | None = None
    """Tokens of the longest text; longer ones are cut off. None before the model is loaded, or if they are refused."""


class EmbedFiles:
    """The files of an embed run: OUT and OUT.run. Both are checked before a model is loaded.
    Raises InvalidRequest or CortexError, each with the next step.

    Regular files are synced and resumed. Stdout, pipes and devices are only written.
    """

    def __init__(self, output: Path, source: str, mode: ExistingFileMode) -> None:
        self.is_resumable = is_regular(output)
        """Whether OUT is a regular file, so that a later run can go on with it."""
        self._output = output
        self._digests: dict[int, str] = {}
        self._run: LockedRunFile | None = None
        self._is_open = False
        extension = output.suffix.lower()
        if output != STDOUT:
            resuming = mode is ExistingFileMode.RESUME
            check_output(output, "-o", source, mode, "embed")
            if extension != ".npy":
                check_extension(output, "-o", mode, "embed")
            check_side_files(output, [run_path(output)], (Path(source),), "embed")
            if resuming and not self.is_resumable:
                raise InvalidRequest(f"{output} is no file, so there is nothing to continue: leave out --resume")
        if not self.is_resumable and extension == ".npy":
            raise InvalidRequest(f"{output} is no file, and npy needs one: give -o a file, or another ending")
        if self.is_resumable:
            self._run = LockedRunFile(output, "embed")
        self._is_resuming = mode is ExistingFileMode.RESUME and bool(file_size(output))
        try:
            self.rows = self._make_row_file(output, extension)
        except BaseException:
            self.__exit__()
            raise
        self.previous_rows = self.rows.count
        """Rows that an earlier run has written."""

    def __enter__(self) -> EmbedFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_open:
            self.rows.close()
        if self._run is not None:
            self._run.close()

    def check_settings(self, settings: EmbedSettings) -> None:
        """Raise InvalidRequest if the run to resume had other settings."""
        if self._run is None or not self._is_resuming:
            return
        saved_settings = self._run.read_settings()
        current_settings = {
            name: value for name, value in _settings_json(settings).items() if not _is_set_on_load(name, settings)
        }
        if changed_names := [name for name, value in current_settings.items() if saved_settings.get(name) != value]:
            raise InvalidRequest(
                f"{self._output.name} was written with another {' and '.join(changed_names)}: use the same, or --force "
                "to begin again"
            )
        for entry in self._run.read_entries():
            self._digests |= enumerate(entry["digests"], int(entry["first"]))

    def check_line(self, row_index: int, line: TextLine) -> None:
        """Raise InvalidRequest if the text of an existing row has changed."""
        if self._digests.get(row_index, line.digest) != line.digest:
            raise InvalidRequest(
                f"the input has changed: row {row_index + 1} of {self._output.name} is of another text than line "
                f"{line.number} has now: use the same input, or --force to begin again"
            )

    def open(self, settings: EmbedSettings, dimensions: int) -> None:
        """Begin or resume the run."""
        if self._is_resuming:
            self.check_settings(settings)
        self.open_rows(dimensions)
        if self._run is not None and not self._is_resuming:
            self._run.start_run(_settings_json(settings))

    def open_rows(self, dimensions: int | None) -> None:
        """Open OUT without OUT.run. `dimensions` is the length of a vector; None: as its rows have."""
        self.rows.open(dimensions)
        self._is_open = True

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows, after the digests of their texts: rows without digests could not be checked by a later run."""
        if self._run is not None:
            self._run.append({"first": self.rows.count, "digests": [row.line.digest for row in rows]}, b"\n")
        self.rows.append(rows)

    def _make_row_file(self, output: Path, extension: str) -> RowFile:
        """Return the row file for OUT's format."""
        overwrite = not self._is_resuming
        if not self.is_resumable:
            return RowStream(None if output == STDOUT else output)
        return (NpyRowFile if extension == ".npy" else JsonlRowFile)(output, overwrite=overwrite)


def _is_set_on_load(name: str, settings: EmbedSettings) -> bool:
    """Return whether a setting is still unknown because the model is not loaded yet."""
    return name in ("weights", "instruction", "longest_text") and settings.weights is None


def _settings_json(settings: EmbedSettings) -> dict[str, Any]:
    """Return the settings as JSON, with the adapter's full path."""
    adapter = settings.adapter
    adapter_path = None if adapter is None else str(Path(os.path.expanduser(adapter)).resolve())
    return asdict(replace(settings, adapter=adapter_path))


# JSONL of embeddings: a record in each line.


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


# A NumPy .npy file of one array, [texts, dimensions] float32, which is valid at every moment.


HEADER_BYTES = 128
_MAGIC = b"\x93NUMPY\x01\x00"
_ITEM_BYTES = 4


class NpyRowFile:
    """A .npy file with one row per text, in input order. A text without a vector has a row of NaN.

    Rows reach the disk before the header counts them. So whatever comes after the rows that it counts was cut off by
    the end of a process, and is written again.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.count = 0
        self.failed = 0
        self._path = path
        self._dimensions: int | None = None
        if not overwrite and path.is_file() and path.stat().st_size:
            self._read_existing()

    def open(self, dimensions: int | None) -> None:
        """Lock the file, create it if missing, and cut off what comes after the rows that its header counts. Raises
        CortexError, InvalidRequest if its vectors have another length.
        """
        if None not in (self._dimensions, dimensions) and self._dimensions != dimensions:
            raise InvalidRequest(
                f"{self._path} has vectors of {self._dimensions} numbers, and not {dimensions}: --force starts again"
            )
        self._dimensions = self._dimensions or dimensions
        try:
            self._lock = open_locked(self._path, "embed")
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, self._end_offset)
            self._write_header(self.count)
        except OSError as error:
            raise write_error(str(self._path), error, "it is as it was") from error

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows and flush them to the disk. Raises CortexError."""
        assert self._dimensions is not None
        nan_row = np.full(self._dimensions, np.nan, "<f4")
        data = memoryview(b"".join((nan_row if r.vector is None else r.vector.astype("<f4")).tobytes() for r in rows))
        offset = self._end_offset
        try:
            while data:
                written_bytes = os.pwrite(self._file, data, offset)
                data, offset = data[written_bytes:], offset + written_bytes
            os.fsync(self._file)
            self._write_header(self.count + len(rows))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end_offset)
            raise write_error(str(self._path), error, "what it holds stays, and --resume goes on") from error
        self.count += len(rows)
        self.failed += sum(row.vector is None for row in rows)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
        self._lock.close()

    @property
    def _end_offset(self) -> int:
        """The byte offset at which the last row ends."""
        return HEADER_BYTES + self.count * _ITEM_BYTES * (self._dimensions or 0)

    def _write_header(self, rows: int) -> None:
        """Write the array's header for this number of rows, and flush it to the disk."""
        os.pwrite(self._file, make_header(rows, self._dimensions), 0)
        os.fsync(self._file)

    def _read_existing(self) -> None:
        """Count the rows of the existing file. Raises InvalidRequest if embed did not write it."""
        format_error = InvalidRequest(f"{self._path} is no array that embed has begun: --force starts again")
        with self._path.open("rb") as file:
            head = file.read(HEADER_BYTES)
            try:
                file.seek(len(_MAGIC))
                shape, fortran, kind = np.lib.format.read_array_header_1_0(file)
            except ValueError:
                raise format_error from None
            if len(shape) != 2 or not shape[1] or fortran or kind != np.dtype("<f4") or head != make_header(*shape):
                raise format_error
        self._dimensions = int(shape[1])
        complete_rows = (self._path.stat().st_size - HEADER_BYTES) // (_ITEM_BYTES * self._dimensions)
        self.count = min(int(shape[0]), complete_rows)
        if self.count:
            vectors = np.memmap(self._path, "<f4", "r", HEADER_BYTES, (self.count, self._dimensions))
            self.failed = int(np.isnan(vectors[:, 0]).sum())


def make_header(rows: int, dimensions: int | None) -> bytes:
    """Return the .npy header of an array; it always has the same length."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {dimensions}), }}"
    header = text.ljust(HEADER_BYTES - len(_MAGIC) - 3).encode() + b"\n"
    return _MAGIC + len(header).to_bytes(2, "little") + header
