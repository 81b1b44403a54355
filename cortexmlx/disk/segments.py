"""Segments: safetensors files of many records. Each is written once, and can be read without the index."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from cortexmlx.disk.folder import open_regular_file

FORMAT = "cortexmlx-kv-1"
"""Changes when older files can no longer be read."""

SEGMENT_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
UNFINISHED_NAME = re.compile(r"[0-9a-f]{32}\.unfinished")

_MAX_HEADER = 64 << 20
"""Bytes that a header has at most in this version."""


class ForeignSegment(ValueError):
    """Raised for a segment file in the format of another version. That version may be able to read it."""


@dataclass(frozen=True)
class RecordLocation:
    """Where a record is: `size` bytes of a segment from `offset` on, with their layout and proof."""

    key: bytes
    segment: str
    offset: int
    size: int
    layout: Layout
    proof: bytes


def write_segment(
    folder: Path, secret: bytes, model: str, records: Sequence[Record]
) -> tuple[str, int, list[RecordLocation]]:
    """Write records to a new file of the folder, mode 0600. Return its name, its size, and where each record is.

    The file appears complete or not at all. `model` is for people. Raises OSError.
    """
    stem = secrets.token_hex(16)
    temporary_path, name = folder / f"{stem}.unfinished", f"{stem}.safetensors"
    with _create_locked(temporary_path) as file:
        try:
            size, locations = write_records(file, name, secret, model, records)
            file.flush()
            os.rename(temporary_path, folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary_path.unlink()
            raise
    return name, size, locations


def write_records(
    file: BinaryIO, name: str, secret: bytes, model: str, records: Sequence[Record]
) -> tuple[int, list[RecordLocation]]:
    """Write the segment `name` of some records to an open file. Return its size, and where each record is."""
    stored_records = [
        (record.key, arrays, layout_of(arrays)) for record in records for arrays in (record.stored_arrays(),)
    ]
    proofs = [compute_proof(secret, key, layout, arrays) for key, arrays, layout in stored_records]
    header, end = _encode_header(
        model, [(key, layout, p) for (key, _, layout), p in zip(stored_records, proofs, strict=True)]
    )
    file.write(header)
    locations, offset = [], len(header)
    for (key, arrays, layout), digest in zip(stored_records, proofs, strict=True):
        for array in arrays:
            file.write(array.data)
        size = sum(array.nbytes for array in arrays)
        locations.append(RecordLocation(key, name, offset, size, layout, digest))
        offset += size
    return len(header) + end, locations


def read_header(folder: Path, name: str) -> tuple[str, list[RecordLocation]]:
    """Return the name of a segment's model, and where its records are, as the file itself says.

    Raises OSError, ForeignSegment for another format, or ValueError if the file is no complete segment.
    """
    with open_regular_file(folder / name) as file:
        return parse_header(file, name, os.fstat(file.fileno()).st_size)


def parse_header(file: IO[bytes], name: str, total: int) -> tuple[str, list[RecordLocation]]:
    """Do what `read_header` does, for an open segment of `total` bytes."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= total - 8:
        raise ValueError(f"{name} has no header")
    if length > _MAX_HEADER:
        raise ForeignSegment(f"the header of {name} has {length} bytes")
    data = file.read(length)
    try:
        header = json.loads(data)
        about = header.pop("__metadata__", {})
        if about.pop("format", None) != FORMAT:
            raise ForeignSegment(f"{name} has another format")
        return printable_name(str(about.pop("model"))), _parse_locations(name, header, about, 8 + length, total)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the header of {name} is damaged") from error


def printable_name(model: str) -> str:
    """Return a model's name with its unprintable characters replaced, for files and terminals."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in model)


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files of dead writers (unlocked). Empty ones stay: a writer may be about to lock them."""
    for path in folder.iterdir():
        if UNFINISHED_NAME.fullmatch(path.name) and path.stat().st_size:
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _encode_header(model: str, records: Sequence[tuple[bytes, Layout, bytes]]) -> tuple[bytes, int]:
    """Return the header, padded to 8 bytes, and the number of bytes that follow it."""
    about = {"format": FORMAT, "model": model}
    tensors: dict[str, Any] = {"__metadata__": about}
    end = 0
    for key, layout, digest in records:
        about[key.hex()] = f"{digest.hex()} {layout_text(layout)}"
        for number, (dtype, shape) in enumerate(layout):
            begin, end = end, end + array_nbytes(dtype, shape)
            name = f"{key.hex()}.{number - 1}" if number else f"{key.hex()}.tokens"
            tensors[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _parse_locations(
    name: str, tensors: dict[str, Any], about: dict[str, str], data_start: int, total: int
) -> list[RecordLocation]:
    """Return the location of each record in a segment's header. Raises ValueError if one is not within the file."""
    locations = []
    for key_hex, entry in about.items():
        digest, _, text = entry.partition(" ")
        layout = parse_layout(text)
        offset = data_start + int(tensors[f"{key_hex}.tokens"]["data_offsets"][0])
        size = sum(array_nbytes(dtype, shape) for dtype, shape in layout)
        key, proof = bytes.fromhex(key_hex), bytes.fromhex(digest)
        if len(key) != 16 or len(proof) != 16 or not data_start <= offset <= offset + size <= total:
            raise ValueError(f"{name} has a record that lies outside of it")
        locations.append(RecordLocation(key, name, offset, size, layout, proof))
    return locations


@contextlib.contextmanager
def _create_locked(path: Path) -> Iterator[Any]:
    """Yield a new file, mode 0600, locked while open: so others can tell it from the file of a dead process."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


# A record: the arrays of one KV block, with a keyed hash that proves their content.


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

_SAFETENSORS_NAMES = {word: name for name, word in DTYPES.items()}

_MAX_BYTES = 1 << 34
"""Bytes that an array of a record can have. A larger one is damage."""


@dataclass(frozen=True, eq=False)
class Record:
    """The arrays and tokens of a KV block or state snapshot, under a 16-byte key. Readers compare the tokens."""

    key: bytes
    tokens: tuple[int, ...]
    arrays: tuple[Array, ...] = field(repr=False)

    def stored_arrays(self) -> tuple[Array, ...]:
        """Return the arrays to write: the tokens as int32, then the record's arrays, all dense and little-endian."""
        return np.array(self.tokens, "<i4"), *(np.ascontiguousarray(a, a.dtype.newbyteorder("<")) for a in self.arrays)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays that are written."""
        return 4 * len(self.tokens) + sum(array.nbytes for array in self.arrays)


def layout_of(arrays: Sequence[Array]) -> Layout:
    """Return the dtype and shape of each array."""
    return tuple((_SAFETENSORS_NAMES[array.dtype.str], array.shape) for array in arrays)


def layout_text(layout: Layout) -> str:
    """Encode a layout as text. Equal layouts have equal texts."""
    return json.dumps([[dtype, list(shape)] for dtype, shape in layout], separators=(",", ":"))


def parse_layout(text: str) -> Layout:
    """Parse a layout from the text that `layout_text` writes. Raises ValueError."""
    try:
        layout = tuple((str(dtype), tuple(int(n) for n in shape)) for dtype, shape in json.loads(text))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError("that is no layout") from error
    if not layout or any(
        d not in DTYPES or array_nbytes(d, s) > _MAX_BYTES or min(s, default=0) < 0 for d, s in layout
    ):
        raise ValueError("that is no layout of a record")
    return layout


def array_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an array of this dtype (its safetensors name) and shape."""
    size = np.dtype(DTYPES[dtype]).itemsize
    for n in shape:
        size *= n
    return size


def compute_proof(secret: bytes, key: bytes, layout: Layout, data: Sequence[Any]) -> bytes:
    """Return a 16-byte proof of a record, keyed with `secret`. `data`: its arrays' bytes in order, in any pieces."""
    text = layout_text(layout).encode()
    digest = hashlib.sha256(b"%d:%d:%d:" % (len(secret), len(key), len(text)) + secret + key + text)
    for part in data:
        digest.update(part)
    return digest.digest()[:16]


def check_record(secret: bytes, location: RecordLocation, data: bytes) -> Record:
    """Return the record in bytes that were read. Raises ValueError unless its proof shows that they are unchanged."""
    if compute_proof(secret, location.key, location.layout, (data,)) != location.proof:
        raise ValueError("a segment is not what was written")
    return decode_record(location.key, location.layout, data)


def decode_record(key: bytes, layout: Layout, data: bytes) -> Record:
    """Decode a record from its bytes in a segment. Arrays are views of `data`. Raises ValueError if it is invalid."""
    arrays, offset = [], 0
    for dtype, shape in layout:
        size = array_nbytes(dtype, shape)
        part = memoryview(data)[offset : offset + size]
        if len(part) < size:
            raise ValueError(f"a record of {len(data)} bytes ends within an array")
        arrays.append(np.frombuffer(part, DTYPES[dtype]).reshape(shape))
        offset += size
    if offset != len(data) or layout[0][0] != "I32":
        raise ValueError(f"a record of {offset} bytes does not take {len(data)}, or begins without tokens")
    return Record(key, tuple(arrays[0].reshape(-1).tolist()), tuple(arrays[1:]))
