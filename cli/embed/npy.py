"""A NumPy .npy file of one array, `[texts, dimensions] float32`, which is valid at every moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cortexmlx.cli.embed.rows import EmbeddingRow
from cortexmlx.cli.files.outputs import open_locked, write_error
from cortexmlx.errors import InvalidRequest

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
