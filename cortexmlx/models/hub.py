"""Fetching a model from the hub, and finding what is in its cache. Nothing is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cortexmlx.errors import ModelCorrupt, ModelNotFound
from cortexmlx.models.messages import logged, one_line
from cortexmlx.models.safetensors_check import check_weights
from cortexmlx.progress import OnProgress, Progress

# What mlx-lm reads of a model folder. Code is left out: it is never run.
NEEDED_FILES = ["*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]


def _untold(progress: Progress) -> None:
    """Progress that nobody watches."""


def fetch(repo: str, on_progress: OnProgress = _untold) -> Path:
    """The folder of `repo` in the hub's cache, downloaded if it is not there completely; only files that are needed.

    A complete copy is used without asking the network. `on_progress` is told the bytes that are here, of the
    files begun so far; the download's threads call it, one at a time. Raises ModelNotFound for an unknown or
    closed repository or no network.
    """
    return cached_folder(repo) or _download(repo, NEEDED_FILES, on_progress)


def fetch_config(repo: str) -> Path:
    """The folder in the hub's cache with at least the config.json of `repo`. Raises ModelNotFound as `fetch` does."""
    return cached_folder(repo) or _download(repo, ["config.json"])


def _download(repo: str, files: list[str], on_progress: OnProgress = _untold) -> Path:
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
        with logged("huggingface_hub"):
            folder = Path(snapshot_download(repo, allow_patterns=files, tqdm_class=_silent_bar(on_progress)))
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


def _silent_bar(on_progress: OnProgress) -> type[Any]:
    """A progress bar for the hub library that shows nothing and tells `on_progress` instead."""
    from huggingface_hub.utils import tqdm

    class SilentBar(tqdm):  # type: ignore[misc]
        """Counts what it is told. The library has one for files, one for bytes received and one for bytes stored."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.stored = options.get("unit") == "B" and not str(options.get("name")).endswith(".transfer")
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            with self.get_lock():
                self.n += n or 0
                if self.stored and self.total:
                    on_progress(Progress("downloading", min(int(self.n), int(self.total)), int(self.total)))

    return SilentBar


def cached_folder(repo: str) -> Path | None:
    """The hub cache's folder of `repo` if it is there with all its weights; no network."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=NEEDED_FILES, local_files_only=True))
        return folder if (folder / "config.json").is_file() and check_weights(folder) else None
    except (OSError, ValueError, ModelCorrupt):
        return None
