"""Read a GGUF file's header: metadata and tensor directory. Every length is checked against the file.

A damaged file must end in one clear error. No allocation is bounded only by numbers in the file. The layout, all
little-endian: magic, version, counts, key/value pairs, tensor infos, padding, tensor data.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models.messages import LFS_POINTER, lfs_pointer_message, unreadable_message

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
# More than any model has, and small enough for memory: a vocabulary has 300,000 strings, a chat template 100 kB.
MAX_ENTRIES = 1 << 20
MAX_ITEMS = 1 << 23
MAX_TEXT = 1 << 24

# Tensor type numbers of the format: name, values per block, bytes per block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# Scalar value types of the metadata: struct format by type number. 8 is a string, 9 an array.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a GGUF file's tensor directory: a tensor's name, shape, type and place in the file."""

    path: Path
    """The file that has its data."""
    name: str
    shape: tuple[int, ...]
    """Row-major (rows first), as MLX and NumPy print it. The file stores the dimensions in reverse order."""
    type_name: str
    offset: int
    """Where its data begins in the file, in bytes."""
    nbytes: int
    """The size of its data in bytes."""

    @property
    def element_count(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file: its metadata and its tensor directory."""

    path: Path
    metadata: dict[str, Any]
    """Numbers, strings, booleans and lists, by key."""
    tensors: dict[str, TensorInfo]
    """The tensors by name."""

    @property
    def files(self) -> frozenset[Path]:
        """The files that hold the tensors, and the header's own file."""
        return frozenset(info.path for info in self.tensors.values()) | {self.path}


class _HeaderReader:
    """Reads a GGUF header's values in order. A wrong length, beyond the bytes left, raises an error with the offset."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.position = 0

    def damage_error(self, problem: str) -> ModelCorrupt:
        """Return the error for damage at the current position."""
        return ModelCorrupt(
            f"{self.path.name} is damaged at byte {self.position} of {self.size}: {problem}. Download the file again."
        )

    def read_bytes(self, count: int, label: str) -> bytes:
        """Read the next `count` bytes. `label` names them in errors."""
        if count > self.size - self.position:
            raise self.damage_error(f"{label} needs {count} bytes, {self.size - self.position} are left")
        chunk = self.data[self.position : self.position + count]
        self.position += count
        return chunk

    def read_number(self, fmt: str, label: str) -> Any:
        """Read a number of the struct format `fmt`."""
        return struct.unpack(fmt, self.read_bytes(struct.calcsize(fmt), label))[0]

    def read_string(self, label: str) -> str:
        """Read a string with its length before it."""
        length = self.read_number("<Q", f"the length of {label}")
        if length > MAX_TEXT:
            raise self.damage_error(f"{label} claims {length} bytes")
        try:
            return self.read_bytes(length, label).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damage_error(f"{label} is not UTF-8") from error

    def read_strings(self, count: int, label: str) -> list[str]:
        """Read an array of `count` strings, in a tight loop: a vocabulary and its merges have 100,000 and more."""
        data, position, size = self.data, self.position, self.size
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if size - position < 8:
                self.position = position
                raise self.damage_error(f"{label} ends early")
            (length,) = unpack(data, position)
            position += 8
            if length > size - position:
                self.position = position
                raise self.damage_error(f"a string of {label} needs {length} bytes, {size - position} are left")
            try:
                strings.append(data[position : position + length].decode("utf-8"))
            except UnicodeDecodeError as error:
                self.position = position
                raise self.damage_error(f"a string of {label} is not UTF-8") from error
            position += length
        self.position = position
        return strings

    def read_value(self, kind: int, key: str) -> Any:
        """Read a metadata value of the type number `kind`."""
        if kind in _SCALARS:
            return self.read_number(_SCALARS[kind], f"the value of {key!r}")
        if kind == _STRING:
            return self.read_string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self.read_array(key)
        raise self.damage_error(f"{key!r} has the unknown value type {kind}")

    def read_array(self, key: str) -> list[Any]:
        """Read an array: its element type, its length and its values."""
        kind = self.read_number("<I", f"the element type of {key!r}")
        count = self.read_number("<Q", f"the length of {key!r}")
        if count > MAX_ITEMS:
            raise self.damage_error(f"{key!r} claims {count} values")
        if kind == _STRING:
            if count * 8 > self.size - self.position:
                raise self.damage_error(f"{key!r} claims {count} strings")
            return self.read_strings(count, repr(key))
        if kind not in _SCALARS:
            raise self.damage_error(f"{key!r} is an array of the unsupported element type {kind}")
        fmt = _SCALARS[kind]
        raw = self.read_bytes(count * struct.calcsize(fmt), f"the array {key!r}")
        return list(struct.unpack(f"<{count}{fmt[1]}", raw))


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header of one GGUF file, and check that every tensor lies inside the file.

    Raises ModelNotFound if the file cannot be opened, and ModelCorrupt if it is damaged or cut short. Raises
    ModelUnsupported for another version of the format or an unknown tensor type number.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ModelNotFound(unreadable_message(path, error)) from error
    with file:
        size = path.stat().st_size
        if size == 0:
            raise ModelCorrupt(f"{path.name} is empty. Download the file again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(_HeaderReader(data, path))


def _parse_header(reader: _HeaderReader) -> GGUFHeader:
    """Parse a header: version, metadata and tensor directory."""
    if reader.data[: len(LFS_POINTER)] == LFS_POINTER:
        raise ModelCorrupt(lfs_pointer_message(reader.path))
    if reader.read_bytes(4, "the magic") != MAGIC:
        raise ModelCorrupt(f"{reader.path.name} is not a GGUF file: it does not begin with the letters GGUF.")
    version = reader.read_number("<I", "the version")
    if version not in SUPPORTED_VERSIONS:
        raise ModelUnsupported(
            f"{reader.path.name} is GGUF version {version}; versions 2 and 3 (little-endian) are read."
        )
    tensor_count = reader.read_number("<Q", "the tensor count")
    pair_count = reader.read_number("<Q", "the metadata count")
    if max(tensor_count, pair_count) > MAX_ENTRIES:
        raise reader.damage_error(f"it claims {tensor_count} tensors and {pair_count} metadata pairs")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.read_string("a metadata key")
        if key in metadata:
            raise reader.damage_error(f"the metadata {key!r} appears twice")
        metadata[key] = reader.read_value(reader.read_number("<I", f"the type of {key!r}"), key)
    entries = [_read_tensor_entry(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 or alignment > 1 << 20:
        raise reader.damage_error(f"the alignment {alignment!r} is not a positive multiple of 8")
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_number, offset in entries:
        if name in tensors:
            raise reader.damage_error(f"tensor {name!r} appears twice")
        tensors[name] = _make_tensor_info(reader, name, shape, type_number, data_start, offset)
    sorted_tensors = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for previous, current in itertools.pairwise(sorted_tensors):
        if previous.offset + previous.nbytes > current.offset:
            raise reader.damage_error(f"tensors {previous.name!r} and {current.name!r} overlap")
    return GGUFHeader(reader.path, metadata, tensors)


def _read_tensor_entry(reader: _HeaderReader) -> tuple[str, tuple[int, ...], int, int]:
    """Read one entry of the tensor directory: name, shape, type number and offset."""
    name = reader.read_string("a tensor name")
    dims = reader.read_number("<I", f"the dimension count of {name!r}")
    if not 1 <= dims <= MAX_DIMS:
        raise reader.damage_error(f"tensor {name!r} has {dims} dimensions")
    shape = tuple(reader.read_number("<Q", f"a dimension of {name!r}") for _ in range(dims))
    if 0 in shape:
        raise reader.damage_error(f"tensor {name!r} has an empty dimension {shape}")
    return (
        name,
        shape[::-1],
        reader.read_number("<I", f"the type of {name!r}"),
        reader.read_number("<Q", f"the offset of {name!r}"),
    )


def _make_tensor_info(
    reader: _HeaderReader, name: str, shape: tuple[int, ...], type_number: int, data_start: int, offset: int
) -> TensorInfo:
    """Return the description of a tensor, after a check of its type and of its place in the file."""
    if type_number not in TENSOR_TYPES:
        raise ModelUnsupported(f"{reader.path.name}: tensor {name!r} has the unknown type number {type_number}.")
    type_name, block_values, block_bytes = TENSOR_TYPES[type_number]
    if shape[-1] % block_values:
        raise reader.damage_error(
            f"tensor {name!r} has rows of {shape[-1]} values, {type_name} needs a multiple of {block_values}"
        )
    nbytes = math.prod(shape) // block_values * block_bytes
    start = data_start + offset
    if start + nbytes > reader.size:
        raise ModelCorrupt(
            f"{reader.path.name} is cut short: tensor {name!r} ends at byte {start + nbytes}, "
            f"the file has {reader.size}. Download the file again."
        )
    return TensorInfo(reader.path, name, shape, type_name, start, nbytes)


# Typed look-ups in a GGUF header. A missing or wrong value is one clear error.


class GGUFMetadata:
    """Typed look-ups in a GGUF header's metadata. `arch_` methods put the architecture's name before the key."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.file = header.path.name
        self.architecture = self.text("general.architecture")

    def _missing_error(self, key: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.file} lacks the metadata {key!r}. Convert it again with a current converter.")

    def _wrong_value_error(self, key: str, expected: str) -> ModelCorrupt:
        """Return the error for a value that is not the `expected` one."""
        value = self.header.metadata.get(key)
        value_text = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        return ModelCorrupt(f"{self.file}: the metadata {key!r} is {value_text}, not {expected}.")

    def text(self, key: str, default: str | None = None) -> str:
        """Return the string under `key`, or `default`. Raises ModelCorrupt if both are missing or it is no string."""
        value = self.header.metadata.get(key, default)
        if value is None:
            raise self._missing_error(key)
        if not isinstance(value, str):
            raise self._wrong_value_error(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        """Return the integer under `key`, or `default`. Raises ModelCorrupt if the value is no integer."""
        value = self.header.metadata.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong_value_error(key, "a whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under `key`, or `default`. Raises ModelCorrupt if the value is no boolean."""
        value = self.header.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong_value_error(key, "true or false")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """Return the list under `key`, whose items must be of the type `kind`; empty if the key is missing."""
        value = self.header.metadata.get(key, [])
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise self._wrong_value_error(key, f"a list of {kind.__name__}")
        return value

    def arch_integer(self, key: str, default: int | None = None) -> int:
        """Return the architecture's positive integer `key`, or `default`. Raises ModelCorrupt if there is neither."""
        full_key = f"{self.architecture}.{key}"
        if isinstance(self.header.metadata.get(full_key), list):
            raise ModelUnsupported(f"{self.file}: {full_key!r} differs from layer to layer, which is not served here.")
        value = self.integer(full_key, default)
        if value is None:
            raise self._missing_error(full_key)
        if not 0 < value < 1 << 31:
            raise self._wrong_value_error(full_key, "a sensible positive number")
        return value

    def arch_number(self, key: str, default: float | None = None) -> float:
        """Return the architecture's positive number `key`, or `default`. Raises ModelCorrupt if there is neither."""
        full_key = f"{self.architecture}.{key}"
        value = self.header.metadata.get(full_key, default)
        if value is None:
            raise self._missing_error(full_key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong_value_error(full_key, "a positive number")
        return float(value)

    def arch_has(self, key: str) -> bool:
        """Return whether the architecture's metadata has `key`."""
        return f"{self.architecture}.{key}" in self.header.metadata


# A model in one GGUF file, or split into several files: `NAME-00001-of-00003.gguf` and so on.


_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def read_model_header(path: Path) -> GGUFHeader:
    """Return the header of a model in one file or several: the metadata of the first file `path`, and the tensors of
    all parts.

    Raises ModelNotFound for a missing part, and for a `path` that is not the first part. Raises ModelCorrupt for parts
    that do not belong together. Raises what `read_gguf_header` raises.
    """
    first = read_gguf_header(path)
    number, count = first.metadata.get("split.no"), first.metadata.get("split.count")
    if isinstance(number, int) and isinstance(count, int) and number > 0:  # it need not name the architecture
        raise ModelNotFound(
            f"{path.name} is not the first of its {count} parts: give {_part_name(path, 1, count)} instead."
        )
    meta = GGUFMetadata(first)
    count = meta.integer("split.count") or 1
    if count == 1:
        return first
    tensors: dict[str, TensorInfo] = {}
    for header in (first, *(_read_part_header(path, number, count) for number in range(2, count + 1))):
        duplicates = tensors.keys() & header.tensors.keys()
        if duplicates:
            raise ModelCorrupt(f"tensor {min(duplicates)!r} is in two parts of {path.name}. Download the files again.")
        tensors |= header.tensors
    expected_count = meta.integer("split.tensors.count", len(tensors))
    if expected_count != len(tensors):
        raise ModelCorrupt(f"{path.name} says its parts hold {expected_count} tensors, they hold {len(tensors)}.")
    return GGUFHeader(path, first.metadata, tensors)


def part_files(path: Path) -> list[Path]:
    """Return the existing files of a model, `path` first: one, or several parts. Only names are looked at."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    parts = [path.with_name(_part_name(path, number, count)) for number in range(1, count + 1)]
    return [path, *(part for part in parts if part != path and part.is_file())]


def _part_name(path: Path, number: int, count: int) -> str:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelCorrupt(
            f"{path.name} is one of {count} parts, whose names end in -00001-of-{count:05}.gguf and so on: rename it."
        )
    return f"{match[1]}-{number:05}-of-{count:05}.gguf"


def _read_part_header(first_path: Path, number: int, count: int) -> GGUFHeader:
    """Read the header of the part `number`, and check that it belongs to the model."""
    path = first_path.with_name(_part_name(first_path, number, count))
    if not path.is_file():
        raise ModelNotFound(
            f"{first_path.name} is one of {count} parts, and {path.name} is not beside it: download it, too."
        )
    header = read_gguf_header(path)
    part_and_count = header.metadata.get("split.no"), header.metadata.get("split.count")
    if part_and_count != (number - 1, count):
        raise ModelCorrupt(f"{path.name} does not say that it is part {number} of {count}. Download it again.")
    return header
