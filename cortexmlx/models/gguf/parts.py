"""A model in one GGUF file, or split into several files: `NAME-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from cortexmlx.errors import ModelCorrupt, ModelNotFound
from cortexmlx.models.gguf.file import GGUFHeader, TensorInfo, read_header
from cortexmlx.models.gguf.metadata import Metadata

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def read_model_header(path: Path) -> GGUFHeader:
    """Return the header of the model that begins in `path`: the metadata of that file, and the tensors of all its
    parts.

    Raises ModelNotFound for a missing part, and for a `path` that is not the first part. Raises ModelCorrupt for parts
    that do not belong together. Raises what `read_header` raises.
    """
    first = read_header(path)
    meta = Metadata(first)
    count = meta.integer("split.count") or 1
    if count == 1:
        return first
    if meta.integer("split.no", 0):
        raise ModelNotFound(f"{path.name} is not the first of its {count} parts: give {_name(path, 1, count)} instead.")
    tensors: dict[str, TensorInfo] = {}
    for header in (first, *(_part(path, number, count) for number in range(2, count + 1))):
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise ModelCorrupt(f"tensor {min(twice)!r} is in two parts of {path.name}. Download the files again.")
        tensors |= header.tensors
    wanted = meta.integer("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ModelCorrupt(f"{path.name} says its parts hold {wanted} tensors, they hold {len(tensors)}.")
    return GGUFHeader(path, first.metadata, tensors)


def part_files(path: Path) -> list[Path]:
    """Return the file of a model, or all its parts that exist. Only the files' names count."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    parts = [path.with_name(_name(path, number, count)) for number in range(1, count + 1)]
    return [path, *(part for part in parts if part != path and part.is_file())]


def _name(path: Path, number: int, count: int) -> str:
    found = _PART.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ModelCorrupt(
            f"{path.name} is one of {count} parts, whose names end in -00001-of-{count:05}.gguf and so on: rename it."
        )
    return f"{found[1]}-{number:05}-of-{count:05}.gguf"


def _part(first: Path, number: int, count: int) -> GGUFHeader:
    path = first.with_name(_name(first, number, count))
    if not path.is_file():
        raise ModelNotFound(
            f"{first.name} is one of {count} parts, and {path.name} is not beside it: download it, too."
        )
    header = read_header(path)
    stated = header.metadata.get("split.no"), header.metadata.get("split.count")
    if stated != (number - 1, count):
        raise ModelCorrupt(f"{path.name} does not say that it is part {number} of {count}. Download it again.")
    return header
