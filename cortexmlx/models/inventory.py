"""What models are on this machine, without asking the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cortexmlx.models.resolve import STARTER, SourceKind, starter_path


@dataclass(frozen=True)
class LocalModel:
    """A model that can be run now: the name to give, where it comes from and lies, and its size in bytes."""

    name: str
    kind: SourceKind
    path: Path
    size: int


def list_models() -> list[LocalModel]:
    """The starter model, if installed, and the complete models in the hub's cache, by name."""
    found: list[LocalModel] = []
    starter = starter_path()
    if starter is not None:
        found.append(LocalModel(STARTER, SourceKind.STARTER, starter, starter.stat().st_size))
    return found + sorted(_in_hub_cache(), key=lambda model: model.name.lower())


def _in_hub_cache() -> list[LocalModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    from cortexmlx.models.hub.cache import cached_folder

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    repos = [repo for repo in cache.repos if repo.repo_type == "model"]
    folders = ((repo, cached_folder(repo.repo_id)) for repo in repos)
    return [
        LocalModel(repo.repo_id, SourceKind.HUB, folder, repo.size_on_disk)
        for repo, folder in folders
        if folder is not None
    ]
