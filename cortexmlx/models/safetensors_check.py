"""Check safetensors files before MLX reads them: complete, undamaged, all present.

MLX maps the file and reads where the header points. The commonest damage is a download that was cut short. The error
says so, with the numbers.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.folder_config import read_json_object
from cortexmlx.models.messages import LFS_POINTER, lfs_pointer_message, unreadable_message

INDEX_FILE = "model.safetensors.index.json"

_LARGEST_AXIS = 1 << 31
"""More than a tensor of MLX has along an axis."""


def check_weights(folder: Path) -> dict[str, Path]:
    """Check the weight files `model*.safetensors` of a folder, and return the file of each tensor by its name.

    All files that the index lists must be present. An index of which no file is present is ignored: it came with the
    model that these weights were made from.

    Raises ModelCorrupt with the file, the tensor and the missing bytes. Also raises it for a tensor that is in two
    files: then the folder has two downloads, and either may be the wrong one. The result is empty if there are no
    weights.
    """
    tensors: dict[str, Path] = {}
    files = sorted(folder.glob("model*.safetensors"))
    for file in files:
        for name in read_safetensors_header(file):
            if name in tensors:
                raise ModelCorrupt(
                    f"{folder} has {name} both in {tensors[name].name} and in {file.name}: remove the one that does "
                    "not belong to the model."
                )
            tensors[name] = file
    index = folder / INDEX_FILE
    if index.is_file():
        shards, present = set(read_weight_map(index).values()), {file.name for file in files}
        missing = sorted(shards - present)
        if missing and (shards & present or not present):
            raise ModelCorrupt(
                f"{folder} lacks {len(missing)} of its weight files, for example {missing[0]}. Download them again."
            )
    return tensors


def find_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Path]:
    """Return the file of each tensor with a `wanted` name, by name. Files without such a tensor may be missing.

    Raises ModelCorrupt if a file with such a tensor is missing or damaged.
    """
    index = folder / INDEX_FILE
    listed = read_weight_map(index) if index.is_file() else {}
    files = {name: folder / file for name, file in listed.items() if wanted(name)}
    if not any(file.is_file() for file in files.values()):  # no index, or one of another checkpoint
        return {name: file for name, file in check_weights(folder).items() if wanted(name)}
    headers = {file: read_safetensors_header(file) for file in set(files.values())}
    if lost := sorted(name for name, file in files.items() if name not in headers[file]):
        raise ModelCorrupt(f"{files[lost[0]]} lacks {lost[0]}, which {index.name} says is in it. Download both again.")
    return files


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the weight file of each tensor that an index lists. No name leads out of the folder."""
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict):
        raise ModelCorrupt(f"{index} has no weight_map. Download it again.")
    return {str(name): Path(str(file)).name for name, file in files.items()}


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """Return the header entry of each tensor in a safetensors file by name: `dtype`, `shape`, `data_offsets`. The file
    has the bytes of all of them.

    Raises ModelCorrupt with the file and the missing bytes.
    """
    try:
        return _parse_header(file)
    except OSError as error:
        raise ModelCorrupt(unreadable_message(file, error)) from error


def _parse_header(file: Path) -> dict[str, Any]:
    """Read and check a file's header, as `read_safetensors_header` returns it. Raises OSError, too."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length_field = stream.read(8)
        if (length_field + stream.read(len(LFS_POINTER) - 8)) == LFS_POINTER:
            raise ModelCorrupt(lfs_pointer_message(file))
        stream.seek(8)
        length = struct.unpack("<Q", length_field)[0] if len(length_field) == 8 else size
        if length > size - 8:
            raise ModelCorrupt(f"{file} is damaged or cut short: it has {size} bytes. Download it again.")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            ranges = sorted((*_byte_range(entry), name) for name, entry in header.items())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelCorrupt(f"{file} is damaged: its header cannot be read. Download it again.") from error
    needed_size = 8 + length + max((end for _, end, _ in ranges), default=0)
    if needed_size > size:
        raise ModelCorrupt(f"{file} is cut short: it has {size} of {needed_size} bytes. Download it again.")
    for (_, end, name), (next_start, _, next_name) in itertools.pairwise(ranges):
        if next_start < end:
            raise ModelCorrupt(f"{file} is damaged: {name} and {next_name} share bytes. Download it again.")
    return header


def _byte_range(entry: Any) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end. Raises ValueError, KeyError or TypeError if its entry is invalid."""
    start, end = entry["data_offsets"]
    numbers: tuple[Any, ...] = start, end, *entry["shape"]
    if not all(type(number) is int for number in numbers) or not isinstance(entry["dtype"], str):
        raise ValueError("an entry of other types")
    if not 0 <= start <= end or not all(0 <= size < _LARGEST_AXIS for size in entry["shape"]):
        raise ValueError("offsets run backwards, or a size that no tensor has")
    return start, end
