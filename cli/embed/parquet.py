"""Parquet files of embeddings. Such a file cannot be appended to, so rows are collected in OUT.rows and OUT is written
at the end.
"""

from __future__ import annotations

import base64
import importlib.util
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cortexmlx.cli.embed.jsonl import JsonlRowFile
from cortexmlx.cli.embed.rows import EmbeddingRow
from cortexmlx.cli.files.outputs import write_error
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.system.files import write_atomically

_ROWS_PER_GROUP = 4096
"""Rows of a row group."""


def pending_rows_path(output: Path) -> Path:
    """Return the path of OUT.rows, which has the rows of an unfinished run."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + ".rows")


def require_pyarrow() -> None:
    """Raise CortexError if pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise CortexError("pyarrow is not installed: pip install -e '.[parquet]', or give -o a .npy or .jsonl")


class ParquetRowFile:
    """A Parquet file of id, embedding (float32 list), prompt_tokens, truncated, error; in OUT.rows until finished."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        require_pyarrow()
        self._path = path
        self._finished = (
            not overwrite and path.is_file() and path.stat().st_size > 0 and not pending_rows_path(path).exists()
        )
        self._rows: JsonlRowFile | None = None
        self._dimensions: int | None = None
        if self._finished:
            self._count_rows()
        else:
            self._rows = JsonlRowFile(pending_rows_path(path), overwrite=overwrite, packed=True)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._finished_count if self._rows is None else self._rows.count

    @property
    def failed(self) -> int:
        """The number of rows without a vector."""
        return self._finished_failed if self._rows is None else self._rows.failed

    def open(self, dimensions: int | None) -> None:
        """Unless finished, lock OUT.rows, create it if missing, and cut off an incomplete end. Raises CortexError."""
        self._dimensions = dimensions
        if self._rows is not None:
            self._rows.open(dimensions)

    def append(self, rows: Sequence[EmbeddingRow]) -> None:
        """Write rows to OUT.rows and flush them to disk. Raises CortexError, InvalidRequest if the file is finished."""
        if self._rows is None:
            raise InvalidRequest(
                f"{self._path} is finished, with {self.count:,} rows, and the input has more: a Parquet file cannot be "
                "continued, so give -o another name, or --force to begin again"
            )
        self._rows.append(rows)

    def finish(self) -> None:
        """Write the Parquet file and remove OUT.rows; do nothing if it is finished already. Raises CortexError."""
        if self._rows is None:
            return
        try:
            with write_atomically(self._path) as file:
                _write_parquet(file, self._rows, self._dimensions)
            pending_rows_path(self._path).unlink()
        except OSError as error:
            raise write_error(
                str(self._path), error, f"{pending_rows_path(self._path)} has all rows, and --resume goes on"
            ) from error

    def close(self) -> None:
        """Close OUT.rows."""
        if self._rows is not None:
            self._rows.close()

    def _count_rows(self) -> None:
        """Count the rows of a finished Parquet file."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self._path) as file:
                self._finished_count = int(file.metadata.num_rows)
                self._finished_failed = self._finished_count - int(
                    sum(group.column("error").null_count for group in file.iter_batches(columns=["error"]))
                )
        except (pa.ArrowException, KeyError, OSError):
            raise InvalidRequest(f"{self._path} is no Parquet file of embed: --force starts again") from None


def _write_parquet(file: Any, rows: JsonlRowFile, dimensions: int | None) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    numbers = all(type(record["id"]) is int and -(2**63) <= record["id"] < 2**63 for record in rows.records())
    if dimensions is None:
        packed = next((record["embedding"] for record in rows.records() if "embedding" in record), "")
        dimensions = len(base64.b64decode(packed)) // 4 or None
    vectors = pa.list_(pa.float32()) if dimensions is None else pa.list_(pa.float32(), dimensions)
    schema = pa.schema(
        [
            ("id", pa.int64() if numbers else pa.string()),
            ("embedding", vectors),
            ("prompt_tokens", pa.int32()),
            ("truncated", pa.bool_()),
            ("error", pa.string()),
        ]
    )
    records = rows.records()
    with parquet.ParquetWriter(file, schema) as writer:
        while group := list(itertools.islice(records, _ROWS_PER_GROUP)):
            embeddings = [_decode_vector(record.get("embedding")) for record in group]
            columns = [
                [record["id"] if numbers else _encodable_text(record["id"]) for record in group],
                embeddings,
                [record.get("prompt_tokens") for record in group],
                [record.get("truncated", False) for record in group],
                [record["error"]["message"] if "error" in record else None for record in group],
            ]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _encodable_text(name: object) -> str:
    """Return an id as text that UTF-8 can hold: half of a surrogate pair is escaped as in JSON."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def _decode_vector(packed: str | None) -> npt.NDArray[np.float32] | None:
    """Return the vector of a base64 string; None for none."""
    return None if packed is None else np.frombuffer(base64.b64decode(packed), "<f4")
