"""Fetching a model from the hub, with its own progress bar, and finding what is in its cache."""

from __future__ import annotations

from pathlib import Path

from cortexmlx.errors import ModelCorrupt, ModelNotFound
from cortexmlx.models.messages import one_line
from cortexmlx.models.safetensors_check import check_weights

# What mlx-lm reads of a model folder. Code is left out: it is never run.
NEEDED_FILES = ["*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]


def fetch(repo: str) -> Path:
    """The folder of `repo` in the hub's cache, downloaded if it is not there completely; only files that are needed.

    A complete copy is used without asking the network. Raises ModelNotFound for an unknown or closed repository or no
    network.
    """
    return cached_folder(repo) or _download(repo, NEEDED_FILES)


def fetch_config(repo: str) -> Path:
    """The folder in the hub's cache with at least the config.json of `repo`. Raises ModelNotFound as `fetch` does."""
    return cached_folder(repo) or _download(repo, ["config.json"])


def _download(repo: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(repo, allow_patterns=files))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{repo} asks for consent first: accept its terms on https://huggingface.co/{repo}, then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {repo!r} (or it is private: `hf auth login`). Check the spelling."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelNotFound(
            f"{repo!r} is not completely on this machine and the hub cannot be reached. Connect to the network, or see "
            "`cortexmlx models` for what is here."
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"{repo!r} cannot be a hub id: {one_line(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelNotFound(f"downloading {repo!r} failed: {one_line(error)}. Try again.") from error
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"the hub's {repo!r} has no config.json. If it holds GGUF files, download one and give its path: "
            f"`hf download {repo} FILE.gguf`."
        )
    return folder


def cached_folder(repo: str) -> Path | None:
    """The hub cache's folder of `repo` if it is there with all its weights; no network."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=NEEDED_FILES, local_files_only=True))
        return folder if (folder / "config.json").is_file() and check_weights(folder) else None
    except (OSError, ValueError, ModelCorrupt):
        return None
