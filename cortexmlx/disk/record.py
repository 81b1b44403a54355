"""A record: the arrays of one KV block, with a keyed hash that proves their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Layout = tuple[tuple[str, tuple[int, ...]], ...]
"""The dtype, by its name in safetensors, and the shape of each array of a record, in order."""

DTYPES = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "I64": "<i8",
}
"""NumPy's name of each dtype, by its name in safetensors. NumPy has no bfloat16: its bits are stored as U16."""

_WORDS = {word: name for name, word in DTYPES.items()}

_MOST_BYTES = 1 << 34
"""Bytes that an array of a record can have. A larger one is damage."""


@dataclass(frozen=True, eq=False)
class Record:
    """Arrays under a key of 16 bytes, with the tokens that they belong to. Readers compare the tokens."""

    key: bytes
    tokens: tuple[int, ...]
    arrays: tuple[Array, ...] = field(repr=False)

    def stored(self) -> tuple[Array, ...]:
        """Return the arrays that are written: the tokens as int32, then the record's arrays, each dense and
        little-endian.
        """
        return np.array(self.tokens, "<i4"), *(_dense(array) for array in self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are written."""
        return 4 * len(self.tokens) + sum(array.nbytes for array in self.arrays)


def layout_of(arrays: Sequence[Array]) -> Layout:
    """Return the layout of arrays."""
    return tuple((_WORDS[array.dtype.str], array.shape) for array in arrays)


def layout_text(layout: Layout) -> str:
    """Return a layout as text. Equal layouts have equal texts."""
    return json.dumps([[dtype, list(shape)] for dtype, shape in layout], separators=(",", ":"))


def layout_from(text: str) -> Layout:
    """Return the layout of such a text. Raises ValueError if it is not one."""
    try:
        layout = tuple((str(dtype), tuple(int(n) for n in shape)) for dtype, shape in json.loads(text))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError("that is no layout") from error
    if not layout or any(d not in DTYPES or size_of(d, s) > _MOST_BYTES or min(s, default=0) < 0 for d, s in layout):
        raise ValueError("that is no layout of a record")
    return layout


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an array."""
    size = np.dtype(DTYPES[dtype]).itemsize
    for n in shape:
        size *= n
    return size


def proof(secret: bytes, key: bytes, layout: Layout, data: Sequence[Any]) -> bytes:
    """Return 16 bytes that only a record with exactly this content has, in a folder with this secret. `data` has the
    bytes of its arrays, one array after the other, in any pieces.
    """
    text = layout_text(layout).encode()
    digest = hashlib.sha256(b"%d:%d:%d:" % (len(secret), len(key), len(text)) + secret + key + text)
    for part in data:
        digest.update(part)
    return digest.digest()[:16]


def restored(key: bytes, layout: Layout, data: bytes) -> Record:
    """Return the record that was written as `data`. Its arrays are views of `data`. Raises ValueError if `data` is no
    record.
    """
    arrays, begin = [], 0
    for dtype, shape in layout:
        size = size_of(dtype, shape)
        part = memoryview(data)[begin : begin + size]
        if len(part) < size:
            raise ValueError(f"a record of {len(data)} bytes ends within an array")
        arrays.append(np.frombuffer(part, DTYPES[dtype]).reshape(shape))
        begin += size
    if begin != len(data) or layout[0][0] != "I32":
        raise ValueError(f"a record of {begin} bytes does not take {len(data)}, or begins without tokens")
    return Record(key, tuple(arrays[0].reshape(-1).tolist()), tuple(arrays[1:]))


def _dense(array: Array) -> Array:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
