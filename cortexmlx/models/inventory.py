"""List the models on this machine, without the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError
from cortexmlx.models.folder_config import foreign_quantization, language_configs, read_config, stated_context_length
from cortexmlx.models.gguf.file import part_files, read_model_header
from cortexmlx.models.resolve import STARTER, SourceKind, starter_path


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine that can be run: its name, place, size and quantization."""

    name: str
    """The name to give to the commands."""
    kind: SourceKind
    path: Path
    size: int
    """Bytes of the weights on disk."""
    quantization: str = ""
    """How the weights are stored (`4-bit`, `Q4_1`, `bfloat16`), or `damaged`; empty if the files do not say."""
    context: int | None = None
    """The context in tokens; None if the files do not state it."""


def list_models() -> list[LocalModel]:
    """Return this machine's models: the starter model if installed, then complete ones in the hub's cache by name."""
    models: list[LocalModel] = []
    starter = starter_path()
    if starter is not None:
        models.append(_describe_gguf(STARTER, SourceKind.STARTER, starter))
    return models + sorted(_list_hub_cache(), key=lambda model: model.name.lower())


def _list_hub_cache() -> list[LocalModel]:
    """Return the complete models in the hub's cache."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    from cortexmlx.models.hub import cached_folder

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    repos = [repo for repo in cache.repos if repo.repo_type == "model"]
    folders = ((repo, cached_folder(repo.repo_id)) for repo in repos)
    return [_describe_folder(repo.repo_id, SourceKind.HUB, folder) for repo, folder in folders if folder is not None]


def stored_bytes(path: Path) -> int:
    """Return the size on disk of a .gguf file, or of the weight files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in weight_files(path))
    return path.stat().st_size


def weight_files(path: Path) -> list[Path]:
    """Return the files that hold a model's weights: those in a folder, or a .gguf file with its parts."""
    return sorted(path.glob("model*.safetensors")) if path.is_dir() else part_files(path)


def _describe_folder(name: str, kind: SourceKind, folder: Path) -> LocalModel:
    """Return the entry of a model's folder; `damaged` if its config.json cannot be read."""
    try:
        config = read_config(folder)
    except CortexError:
        return LocalModel(name, kind, folder, stored_bytes(folder), "damaged")
    return LocalModel(
        name, kind, folder, stored_bytes(folder), _name_quantization(config), stated_context_length(config)
    )


def _name_quantization(config: Mapping[str, Any]) -> str:
    """Return how a folder's weights are stored, such as "4-bit" or "bfloat16"; empty if config.json does not say."""
    for source in language_configs(config):
        settings = source.get("quantization")
        if isinstance(settings, Mapping) and isinstance(bits := settings.get("bits"), int):
            mode = settings.get("mode", "affine")
            return f"{bits}-bit" if mode == "affine" else str(mode)
    if foreign := foreign_quantization(config):
        return foreign
    dtypes = (source.get(key) for source in language_configs(config) for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in dtypes if isinstance(dtype, str)), "")


def _describe_gguf(name: str, kind: SourceKind, path: Path) -> LocalModel:
    """Return the entry of a GGUF model; `damaged` if its header cannot be read."""
    try:
        header = read_model_header(path)
    except CortexError:
        return LocalModel(name, kind, path, stored_bytes(path), "damaged")
    size = sum(stored_bytes(part) for part in header.files)
    bytes_by_type: Counter[str] = Counter()
    for info in header.tensors.values():
        bytes_by_type[info.type_name] += info.nbytes
    context = header.metadata.get(f"{header.metadata.get('general.architecture')}.context_length")
    largest_type = max(bytes_by_type, key=bytes_by_type.__getitem__, default="")
    return LocalModel(name, kind, path, size, largest_type, context if isinstance(context, int) else None)
