"""Find a model's configuration by name, and the bytes of its weights if the files are on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelNotFound
from cortexmlx.models.folder_config import foreign_quantization, has_draft_head, read_config, read_json_object
from cortexmlx.models.inventory import stored_bytes
from cortexmlx.models.resolve import SourceKind, resolve_model
from cortexmlx.models.safetensors_check import check_weights, read_safetensors_header


@dataclass(frozen=True)
class PlanSource:
    """The configuration of a model to plan for, and the bytes of its weights."""

    name: str
    config: Mapping[str, Any]
    weight_bytes: int | None
    """Bytes in the files of a folder, or in memory after reading a GGUF file, some of whose types grow. None if only
    the configuration is on this machine.
    """
    adapter: int = 0
    """Bytes that the given adapter adds."""
    file_bytes: int | None = None
    """Bytes of the files, if memory takes another number."""
    notes: tuple[str, ...] = ()
    """What is wrong with the files."""
    has_draft_head: bool = False
    """Whether the files have a draft head that the engine uses."""
    folder: Path | None = None
    """The folder with its weights; None if they are not on this machine or in a GGUF file."""


def find_source(target: str) -> PlanSource:
    """Find the configuration of a folder, a config.json, a .gguf file, a hub id or the starter model. No weights are
    loaded.

    For a hub id that is not on this machine, only config.json is downloaded. Raises ModelNotFound or ModelCorrupt.
    """
    path = Path(os.path.expanduser(target))
    if path.suffix.lower() == ".json":
        name = path.resolve().parent.name if path.stem == "config" else path.stem
        if not path.is_file():
            raise ModelNotFound(f"there is no {path}: give a model's folder, its config.json, a .gguf file or a hub id")
        return _from_folder(name, path.parent, read_json_object(path))
    source = resolve_model(target)
    if source.kind is SourceKind.HUB:
        from cortexmlx.models.hub import fetch_config

        folder = fetch_config(target)
        return _from_folder(target, folder, read_config(folder))
    assert source.path is not None
    if source.kind is SourceKind.FOLDER:
        return _from_folder(source.path.resolve().name, source.path, read_config(source.path))
    return _from_gguf(target, source.path)


def _from_folder(name: str, folder: Path, config: Mapping[str, Any]) -> PlanSource:
    try:
        tensors = check_weights(folder)
    except ModelCorrupt as damage:  # the plan does not need the damaged files
        return PlanSource(name, config, None, notes=(f"It does not run as it is: {damage}",))
    with_head, size = has_draft_head(config, tensors), stored_bytes(folder)
    memory = size + (_small_float_bytes(tensors) if foreign_quantization(config) == "fp8" else 0)
    return PlanSource(
        name, config, memory or None, file_bytes=size or None, has_draft_head=with_head, folder=folder if size else None
    )


def _small_float_bytes(tensors: Mapping[str, Path]) -> int:
    """Return the bytes of the tensors of 8-bit floats, which take twice as many when they are bfloat16 in memory."""
    entries = [entry for file in set(tensors.values()) for entry in read_safetensors_header(file).values()]
    return sum(e["data_offsets"][1] - e["data_offsets"][0] for e in entries if e["dtype"].startswith("F8_E4M3"))


def _from_gguf(name: str, path: Path) -> PlanSource:
    """Return the source of a .gguf file, from its header."""
    from cortexmlx.models.gguf.config import activation_type, describe_model
    from cortexmlx.models.gguf.file import read_model_header
    from cortexmlx.models.gguf.tensors import GROUP_SIZE, PACKED_TYPES, tensor_memory_bytes

    header = read_model_header(path)
    description = describe_model(header)
    dtype = activation_type(header, description)
    config = {**description.config, "dtype": dtype}
    packing = PACKED_TYPES.get(max(header.tensors.values(), key=lambda tensor: tensor.nbytes).type_name)
    if packing:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": packing.bits, "mode": packing.mode}
    weights = sum(tensor_memory_bytes(tensor, dtype) for tensor in header.tensors.values())
    return PlanSource(name, config, weights, file_bytes=sum(part.stat().st_size for part in header.files))
