"""The hub's cache on this machine, read without the network."""

from __future__ import annotations

from pathlib import Path

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.safetensors_check import check_weights

WEIGHTS = "model*.safetensors"

NEEDED_FILES = ["*.json", WEIGHTS, "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
"""The files of a model folder that mlx-lm reads. Code is excluded, because it is never run."""


def cached_folder(repo: str) -> Path | None:
    """Return the folder of `repo` in the hub's cache if all its weights are there; None otherwise. Does not use the
    network.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=NEEDED_FILES, local_files_only=True))
        return folder if (folder / "config.json").is_file() and check_weights(folder) else None
    except (OSError, ValueError, ModelCorrupt):
        return None
