"""Fetch a model from the hub. Nothing is printed."""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import os
import queue
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from cortexmlx.errors import CortexError, DownloadFailed, ModelCorrupt, ModelNotFound
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.messages import one_line, redirect_log
from cortexmlx.models.safetensors_check import INDEX_FILE, check_weights, read_weight_map
from cortexmlx.system.waits import take_next
from cortexmlx.types.progress import OnProgress, Progress


def _ignore_progress(progress: Progress) -> None:
    """Ignore the progress of a download: the default callback."""


def _skip_check(folder: Path) -> None:
    """Accept any folder: the default check."""


def fetch_repo(
    repo: str, on_progress: OnProgress = _ignore_progress, check: Callable[[Path], None] = _skip_check
) -> Path:
    """Download the files of `repo` that the hub's cache lacks, and return its folder there.

    A complete copy is used without the network. `on_progress` is called ten times a second, on this thread, with the
    bytes of all weights. If it raises, the download ends at once. Received bytes are kept, and the next download
    continues after them.

    The small files are downloaded first. `check(folder)` may refuse them before gigabytes are fetched.

    Raises ModelNotFound for an unknown or closed repository, and without a network. Raises DownloadFailed if the
    download breaks.
    """
    if (folder := cached_folder(repo)) is not None:
        return folder
    small_patterns = [pattern for pattern in NEEDED_FILES if pattern != WEIGHTS]
    folder = run_in_background(lambda tally: _download_snapshot(repo, small_patterns), on_progress)
    check(folder)
    return run_in_background(lambda tally: _fetch_weights(repo, folder, tally), on_progress)


def fetch_config(repo: str) -> Path:
    """Return a hub cache folder with at least the config.json of `repo`. Raises ModelNotFound as `fetch_repo` does."""
    return _cached_snapshot(repo, ["config.json"]) or run_in_background(
        lambda tally: _download_snapshot(repo, ["config.json"]), _ignore_progress
    )


def fetch_tensor_files(repo: str, wanted: Callable[[str], bool], on_progress: OnProgress = _ignore_progress) -> Path:
    """Download config.json and those weight files of `repo` that, by its index, hold tensors with `wanted` names.
    Return their folder in the hub's cache. Without an index, all weights are downloaded. Errors: see `fetch_repo`.
    """
    if (whole := cached_folder(repo)) is not None:
        return whole
    folder = _cached_snapshot(repo, ["config.json", INDEX_FILE])
    if folder is None or not (folder / INDEX_FILE).is_file():
        folder = run_in_background(lambda tally: _download_snapshot(repo, ["config.json", INDEX_FILE]), on_progress)
    if not (folder / INDEX_FILE).is_file():
        return fetch_repo(repo, on_progress)
    files = sorted({file for name, file in read_weight_map(folder / INDEX_FILE).items() if wanted(name)})
    if all((folder / file).is_file() for file in files):
        return folder
    return run_in_background(lambda tally: _fetch_weights(repo, folder, tally, files), on_progress)


def _fetch_weights(repo: str, folder: Path, tally: DownloadProgress, files: Sequence[str] | None = None) -> Path:
    """Download the weights, or only `files`, into the hub's cache. Then download the rest of the snapshot with the
    hub's library, which finds the weights in the cache. Return the snapshot's folder.
    """
    with _translate_hub_errors(repo), redirect_log("huggingface_hub"):
        large = [each for each in list_large_files(repo, folder.name) if files is None or each.name in files]
        WeightsDownload(repo, folder.name, folder.parent.parent / "blobs", tally).fetch(large)
    return _download_snapshot(repo, NEEDED_FILES if files is None else ["config.json", INDEX_FILE, *files], folder.name)


def _download_snapshot(repo: str, files: list[str], commit: str | None = None) -> Path:
    """Download the files of `repo` that match `files`, with the hub's library, and return their folder."""
    from huggingface_hub import snapshot_download

    with _translate_hub_errors(repo), redirect_log("huggingface_hub"):
        folder = Path(snapshot_download(repo, allow_patterns=files, revision=commit, tqdm_class=_silent_progress_bar()))
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"the hub's {repo!r} has no config.json. If it holds GGUF files, download one and give its path: "
            f"`hf download {repo} FILE.gguf`."
        )
    return folder


@contextmanager
def _translate_hub_errors(repo: str) -> Iterator[None]:
    """Turn errors of the hub, its library and the network into this package's errors, which name the next step."""
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
            f"{suggest_name(repo, cached_repo_names()) or ' Check the spelling.'}"
        ) from error
    except HFValidationError as error:
        raise ModelNotFound(f"{repo!r} cannot be a hub id: {one_line(error)}") from error
    except Exception as error:
        raise _hub_failure_error(repo, error) from error


def _hub_failure_error(repo: str, error: Exception) -> ModelNotFound:
    """Return the error for a hub that cannot be reached, or that answers with an error."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    response_error = next((e for e in (error, error.__cause__) if getattr(e, "response", None) is not None), None)
    status = getattr(getattr(response_error, "response", None), "status_code", None)
    if status in (401, 403):
        return ModelNotFound(f"the hub refuses {repo!r} to you ({status}): `hf auth login` with a token that may.")
    if status == 429:
        return DownloadFailed(f"the hub has had too many requests from here (429): try {repo!r} again in some minutes.")
    if status is not None:
        return DownloadFailed(f"the hub answers {status} for {repo!r}: try again later.")
    network = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    if network or isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        suggestion = suggest_name(repo, cached_repo_names())
        return ModelNotFound(
            f"{repo!r} is not on this machine, or not all of it, and the hub cannot be reached.{suggestion} Connect "
            "to the network, or see `cortexmlx models` for what is here."
        )
    return DownloadFailed(f"downloading {repo!r} failed: {one_line(error)}. Try again.")


def _silent_progress_bar() -> type[Any]:
    """Return a class of progress bars for the hub's library that show nothing."""
    from huggingface_hub.utils import tqdm

    class SilentBar(tqdm):  # type: ignore[misc]
        """A progress bar of the hub that is never shown."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    return SilentBar


# Download a model's large files straight into the hub's cache.
#
# The hub's library discards a partial file when it is stopped. Here the partial file stays, and the next download
# continues after it.


MAX_BYTES = 50 * 10**9
"""A larger file is not served in one piece. It is left to the hub's library."""

_MAX_THREADS = 4
_TRIES = 5
"""How often the same byte is requested."""

_TIMEOUT_SECONDS = 10.0
_FIRST_WAIT_SECONDS = 0.5
_MAX_WAIT_SECONDS = 60.0
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class LargeFile:
    """A weights file of a repository: its name, size and hash."""

    name: str
    size: int
    """Bytes of the file."""
    sha256: str
    """The SHA-256 of the file, which is its name in the cache."""


def list_large_files(repo: str, commit: str) -> list[LargeFile]:
    """Return the weights files of `repo` at `commit` that the hub stores as large files, the largest first."""
    from huggingface_hub import HfApi

    large_files = []
    for entry in HfApi().list_repo_tree(repo, revision=commit):
        name, lfs = entry.path, getattr(entry, "lfs", None)
        if lfs is not None and name.startswith("model") and name.endswith(".safetensors") and lfs.size <= MAX_BYTES:
            large_files.append(LargeFile(name, lfs.size, lfs.sha256))
    return sorted(large_files, key=lambda file: -file.size)


class WeightsDownload:
    """Downloads one commit's weights into `blobs`, the hub cache's folder whose files are named by their SHA-256."""

    def __init__(self, repo: str, commit: str, blobs: Path, tally: DownloadProgress) -> None:
        self._repo, self._commit, self._blobs, self._tally = repo, commit, blobs, tally

    def fetch(self, files: Sequence[LargeFile]) -> None:
        """Download missing `files`, several at once. Raises DownloadFailed, or an error of the hub's library."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        missing = [(file, self._partial_size(file)) for file in files if not (self._blobs / file.sha256).is_file()]
        for file, received_bytes in missing:
            self._tally.expect_file(file.size, received_bytes)
        needed_bytes = sum(file.size - received for file, received in missing)
        if needed_bytes > shutil.disk_usage(self._blobs).free:
            raise self._disk_full_error(needed_bytes)
        pending_files: queue.SimpleQueue[tuple[LargeFile, int]] = queue.SimpleQueue()
        for each in missing:
            pending_files.put(each)
        outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def fetch_pending() -> None:
            try:
                while True:
                    self._fetch_file(*pending_files.get_nowait())
            except queue.Empty:
                outcomes.put(None)
            except BaseException as error:
                outcomes.put(error)

        threads = min(_MAX_THREADS, len(missing))
        for _ in range(threads):
            threading.Thread(target=fetch_pending, name="cortexmlx-download", daemon=True).start()
        for _ in range(threads):
            if (error := take_next(outcomes)) is not None:
                self._tally.stop()
                raise error

    def _partial_path(self, file: LargeFile) -> Path:
        """Return the path of a file's partial download."""
        return self._blobs / f"{file.sha256}.incomplete"  # the hub's tools know this suffix, and remove such files

    def _partial_size(self, file: LargeFile) -> int:
        """Return how many bytes of a file an interrupted download has left; 0 if they are too many."""
        try:
            size = self._partial_path(file).stat().st_size
        except OSError:
            return 0
        return size if size <= file.size else 0

    def _disk_full_error(self, needed_bytes: int) -> DownloadFailed:
        free = format_bytes(shutil.disk_usage(self._blobs).free)
        return DownloadFailed(
            f"the disk is too full for {self._repo}: it takes {format_bytes(needed_bytes)} more, and {free} are free "
            f"in {self._blobs}. What has come stays there: free some, or set HF_HOME to a folder on a larger disk, and "
            "try again."
        )

    def _fetch_file(self, file: LargeFile, counted_bytes: int) -> None:
        """Download one file, check its SHA-256, and move it into place. `counted_bytes` are in the progress already."""
        target = self._blobs / file.sha256
        with self._open_partial(file) as stream:
            if target.is_file():  # another process was faster
                self._tally.add(file.size - counted_bytes)
                self._partial_path(file).unlink(missing_ok=True)
                return
            try:
                digest = self._download_rest(file, stream)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._disk_full_error(file.size - stream.tell()) from error
                raise
            if digest != file.sha256:
                self._partial_path(file).unlink()
                raise DownloadFailed(
                    f"{file.name} of {self._repo} came damaged: its SHA-256 is {digest[:12]}..., and not "
                    f"{file.sha256[:12]}... as the hub says. It is not kept: try again."
                )
            self._partial_path(file).replace(target)

    @contextmanager
    def _open_partial(self, file: LargeFile) -> Iterator[BinaryIO]:
        """Open the partial file at its end, with a lock. Wait for another process that downloads the same file."""
        while True:
            with self._partial_path(file).open("ab", buffering=0) as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._tally.pause(0.2)
                    continue
                if (self._blobs / file.sha256).is_file() or _is_same_file(stream, self._partial_path(file)):
                    yield cast(BinaryIO, stream)
                    return

    def _download_rest(self, file: LargeFile, stream: BinaryIO) -> str:
        """Append the missing bytes of a file to `stream`, with retries. Return the SHA-256 of the whole file."""
        if not self._partial_size(file):
            stream.truncate(0)
        digest, failures = hashlib.sha256(), 0
        with self._partial_path(file).open("rb") as partial_file:
            while data := partial_file.read(_READ_BYTES):
                digest.update(data)
                self._tally.add(0)
        while (start := stream.tell()) < file.size:
            reason, wait = "the connection was closed", _FIRST_WAIT_SECONDS * 2**failures
            try:
                for data in self._stream_bytes(file, start):
                    stream.write(data)
                    digest.update(data)
                    self._tally.add(len(data))
            except Exception as error:
                if not _is_transient(error):
                    raise
                reason, wait = one_line(error), max(wait, _retry_after(error))
            failures = 0 if stream.tell() > start else failures + 1
            if failures == _TRIES:
                raise DownloadFailed(
                    f"{file.name} of {self._repo} stopped at {format_bytes(stream.tell())} of "
                    f"{format_bytes(file.size)}: {reason}. What has come stays: try again to go on there."
                )
            if stream.tell() < file.size:
                self._tally.pause(wait)
        return digest.hexdigest()

    def _stream_bytes(self, file: LargeFile, start: int) -> Iterator[bytes]:
        """Request a file from byte `start` on, and yield its bytes as they arrive."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(self._repo, file.name, revision=self._commit)
        # Count and hash the bytes of the file, not those that a proxy may have compressed.
        headers = build_hf_headers() | {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            is_full_response = response.status_code != 206
            size = _stated_file_size(response.headers, is_full_response)
            if size is not None and size != file.size:
                raise DownloadFailed(
                    f"the hub sends {size:,} bytes for {file.name} of {self._repo}, which has {file.size:,}: try again "
                    "later."
                )
            skip = start if is_full_response else 0  # a server that ignores ranges sends the whole file
            remaining = file.size - start
            for data in response.iter_bytes():
                self._tally.add(0)
                new = data[skip:][:remaining]
                skip, remaining = max(skip - len(data), 0), remaining - len(new)
                if new:
                    yield new


def _stated_file_size(headers: Mapping[str, str], is_full_response: bool) -> int | None:
    """Return the file size that the headers state, or None. `is_full_response`: the response is not a range."""
    size_text = (
        headers.get("Content-Length") if is_full_response else headers.get("Content-Range", "").rpartition("/")[2]
    )
    return _parse_count(size_text)


def _is_same_file(stream: FileIO, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_transient(error: Exception) -> bool:
    """Return whether another try may succeed: after a broken connection, or if the hub was busy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    # The hub's library changes its HTTP package. The error of a broken connection keeps its name.
    return status in _TRANSIENT_STATUSES or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _retry_after(error: Exception) -> float:
    """Return the seconds that the hub asks to wait before another try; 0 if it asks for none."""
    delay_text = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(float(_parse_count(delay_text) or 0), _MAX_WAIT_SECONDS)


def _parse_count(text: str | None) -> int | None:
    """Return the whole number that a header states; None if it states none."""
    return int(text) if text and re.fullmatch("[0-9]{1,18}", text) else None


# Network work on a background thread, so that Ctrl-C never waits for the network.


T = TypeVar("T")

_EVERY_SECONDS = 0.1
_RATE_SECONDS = 5.0
"""The rate is the mean over this many seconds."""


class DownloadStopped(Exception):
    """Raised in a download's own threads after the caller has stopped it."""


class DownloadProgress:
    """Counts the bytes of a download, and tells its threads when to stop. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_event = threading.Event()
        self._total = self._done = self._cached = 0
        self._rate_samples: deque[tuple[float, int]] = deque()

    def expect_file(self, size: int, cached: int) -> None:
        """Add a file of `size` bytes to the total. `cached` of them are on this machine already."""
        with self._lock:
            self._total += size
            self._done += cached
            self._cached += cached

    def add(self, size: int) -> None:
        """Count `size` received bytes. A negative size takes back bytes that cannot be used. Raises DownloadStopped."""
        with self._lock:
            self._done += size
            self._cached = min(self._cached, self._done)
        if self._stop_event.is_set():
            raise DownloadStopped

    def stop(self) -> None:
        """Make the download's threads end at their next call of `add` or `pause`."""
        self._stop_event.set()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`. Raises DownloadStopped when the download is stopped."""
        if self._stop_event.wait(seconds):
            raise DownloadStopped

    def progress(self) -> Progress:
        """Return the progress so far, with the download rate of the last seconds."""
        now = time.monotonic()
        with self._lock:
            received = self._done - self._cached
            if not self._total:
                return Progress("downloading", 0, 0)
            self._rate_samples.append((now, received))
            while now - self._rate_samples[0][0] > _RATE_SECONDS:
                self._rate_samples.popleft()
            sample_time, sample_received = self._rate_samples[0]
            rate = max(0.0, (received - sample_received) / (now - sample_time)) if now > sample_time else 0.0
            return Progress("downloading", self._done, self._total, self._cached, rate)


def run_in_background(work: Callable[[DownloadProgress], T], on_progress: OnProgress) -> T:
    """Run `work` on a thread of its own and return its result. Meanwhile call `on_progress` on this thread, ten times
    a second.

    An exception in this thread ends the waiting at once. The work then ends at its next byte.
    """
    tally = DownloadProgress()
    outcome: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(tally), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="cortexmlx-download", daemon=True).start()
    try:
        while True:
            try:
                result, error = outcome.get(timeout=_EVERY_SECONDS)
                break
            except queue.Empty:
                on_progress(tally.progress())
        if error is None and (last := tally.progress()).total:
            on_progress(last)
    except BaseException:
        tally.stop()
        raise
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


# The hub's cache on this machine, read without the network.


WEIGHTS = "model*.safetensors"

NEEDED_FILES = ["*.json", WEIGHTS, "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]
"""The files of a model folder that mlx-lm reads. Code is excluded, because it is never run."""


def cached_folder(repo: str) -> Path | None:
    """Return `repo`'s folder in the hub's cache, without network; None unless config.json and all weights are there."""
    folder = _cached_snapshot(repo, NEEDED_FILES)
    try:
        return folder if folder is not None and check_weights(folder) else None
    except (OSError, ModelCorrupt):
        return None


def _cached_snapshot(repo: str, files: list[str]) -> Path | None:
    """Return `repo`'s folder in the hub's cache, without network; None without a config.json. Others of the `files` may
    be missing.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=files, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() else None


# Suggestions for a model name that was not found: similar names and files.


def cached_repo_names() -> list[str]:
    """Return the names of all models in the hub's cache, complete or not, sorted. Only the list of folders is read."""
    from huggingface_hub import constants

    try:
        folders = [path.name for path in Path(constants.HF_HUB_CACHE).iterdir() if path.name.startswith("models--")]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/", 1) for name in folders)


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Return ` Did you mean ...?` with the closest of `names` or the models beside `name`; empty if none is close."""
    names_by_key = {each.lower(): each for each in (*_models_beside(Path(name)), *names)}
    # Users often know a model's name but not its maker, so the part after the slash is also compared alone.
    names_by_key |= {
        each.lower().rpartition("/")[2]: each for each in names_by_key.values() if "/" in each and "/" not in name
    }
    close = difflib.get_close_matches(name.lower(), names_by_key, n=1, cutoff=0.75)
    return f" Did you mean {names_by_key[close[0]]!r}?" if close and names_by_key[close[0]] != name else ""


def _models_beside(path: Path) -> list[str]:
    """Return the models in the same folder as `path`, written as `path` is."""
    try:
        siblings = path.expanduser().parent.iterdir()
        models = [each for each in siblings if each.suffix == ".gguf" or (each / "config.json").is_file()]
    except (OSError, RuntimeError):
        return []
    prefix = str(path).removesuffix(path.name)
    return [prefix + each.name for each in models]
