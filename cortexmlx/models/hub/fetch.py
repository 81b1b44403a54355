"""Fetch a model from the hub. Nothing is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, DownloadFailed, ModelNotFound
from cortexmlx.models.hub.background import DownloadProgress, run_in_background
from cortexmlx.models.hub.cache import NEEDED_FILES, WEIGHTS, cached_folder
from cortexmlx.models.hub.names import did_you_mean, hub_names
from cortexmlx.models.hub.weights import WeightsDownload, list_large
from cortexmlx.models.messages import logged, one_line
from cortexmlx.types.progress import OnProgress, Progress


def _ignore_progress(progress: Progress) -> None:
    """Do nothing."""


def _accept_any(folder: Path) -> None:
    """Accept all settings."""


def fetch(repo: str, on_progress: OnProgress = _ignore_progress, check: Callable[[Path], None] = _accept_any) -> Path:
    """Return the folder of `repo` in the hub's cache, and download the needed files that are missing.

    A complete copy is used without the network. `on_progress` is called ten times a second, on this thread, with the
    bytes of all weights. If it raises, the download ends at once. Received bytes are kept, and the next download
    continues after them.

    The small files are downloaded first. `check(folder)` may refuse them before gigabytes are fetched.

    Raises ModelNotFound for an unknown or closed repository, and without a network. Raises DownloadFailed if the
    download breaks.
    """
    if (folder := cached_folder(repo)) is not None:
        return folder
    small = [pattern for pattern in NEEDED_FILES if pattern != WEIGHTS]
    folder = run_in_background(lambda tally: _snapshot(repo, small), on_progress)
    check(folder)
    return run_in_background(lambda tally: _fetch_weights(repo, folder, tally), on_progress)


def fetch_config(repo: str) -> Path:
    """Return a folder in the hub's cache that has at least the config.json of `repo`. Raises ModelNotFound as `fetch`
    does.
    """
    return cached_folder(repo) or run_in_background(lambda tally: _snapshot(repo, ["config.json"]), _ignore_progress)


def _fetch_weights(repo: str, folder: Path, tally: DownloadProgress) -> Path:
    """Download the large files into the hub's cache. The hub's library finds them there when it completes the
    snapshot.
    """
    with _hub_errors(repo), logged("huggingface_hub"):
        large = list_large(repo, folder.name)
        WeightsDownload(repo, folder.name, folder.parent.parent / "blobs", tally).fetch(large)
    return _snapshot(repo, NEEDED_FILES, folder.name)


def _snapshot(repo: str, files: list[str], commit: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(repo), logged("huggingface_hub"):
        folder = Path(snapshot_download(repo, allow_patterns=files, revision=commit, tqdm_class=_silent_bar()))
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"the hub's {repo!r} has no config.json. If it holds GGUF files, download one and give its path: "
            f"`hf download {repo} FILE.gguf`."
        )
    return folder


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn errors of the hub, its library and the network into ours, which name the next step."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        yield
    except CortexError:
        raise
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{repo} asks for consent first: accept its terms on {constants.ENDPOINT}/{repo}, then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {repo!r} (or it is private: `hf auth login`)."
            f"{did_you_mean(repo, hub_names()) or ' Check the spelling.'}"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"{repo!r} cannot be a hub id: {one_line(error)}") from error
    except Exception as error:
        raise _not_reached(repo, error) from error


def _not_reached(repo: str, error: Exception) -> ModelNotFound:
    """Return the error for a hub that could not be reached, or that gave another answer than the requested one."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    answered = next((e for e in (error, error.__cause__) if getattr(e, "response", None) is not None), None)
    status = getattr(getattr(answered, "response", None), "status_code", None)
    if status in (401, 403):
        return ModelNotFound(f"the hub refuses {repo!r} to you ({status}): `hf auth login` with a token that may.")
    if status == 429:
        return DownloadFailed(f"the hub has had too many requests from here (429): try {repo!r} again in some minutes.")
    if status is not None:
        return DownloadFailed(f"the hub answers {status} for {repo!r}: try again later.")
    network = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    if network or isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        near = did_you_mean(repo, hub_names())
        return ModelNotFound(
            f"{repo!r} is not on this machine, or not all of it, and the hub cannot be reached.{near} Connect "
            "to the network, or see `cortexmlx models` for what is here."
        )
    return DownloadFailed(f"downloading {repo!r} failed: {one_line(error)}. Try again.")


def _silent_bar() -> type[Any]:
    """Return a progress bar for the hub's library that shows nothing."""
    from huggingface_hub.utils import tqdm

    class SilentBar(tqdm):  # type: ignore[misc]
        """Counts nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    return SilentBar
