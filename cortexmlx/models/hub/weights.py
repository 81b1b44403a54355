"""Download a model's large files straight into the hub's cache.

The hub's library discards a partial file when it is stopped. Here the partial file stays, and the next download
continues after it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import queue
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

from cortexmlx.errors import DownloadFailed
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.hub.background import DownloadProgress
from cortexmlx.models.messages import one_line
from cortexmlx.system.waits import take_from

MOST_BYTES = 50 * 10**9
"""A larger file is not served in one piece. It is left to the hub's library."""

_AT_ONCE = 4
_TRIES = 5
"""How often the same byte is requested."""

_TIMEOUT_SECONDS = 10.0
_FIRST_WAIT_SECONDS = 0.5
_MOST_WAIT_SECONDS = 60.0
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class LargeFile:
    """A file of a repository."""

    name: str
    size: int
    """Bytes of the file."""
    sha256: str
    """The SHA-256 of the file, which is its name in the cache."""


def list_large(repo: str, commit: str) -> list[LargeFile]:
    """Return the weights of `repo` at `commit` that the hub stores as large files, the largest first."""
    from huggingface_hub import HfApi

    found = []
    for entry in HfApi().list_repo_tree(repo, revision=commit):
        name, lfs = entry.path, getattr(entry, "lfs", None)
        if lfs is not None and name.startswith("model") and name.endswith(".safetensors") and lfs.size <= MOST_BYTES:
            found.append(LargeFile(name, lfs.size, lfs.sha256))
    return sorted(found, key=lambda file: -file.size)


class WeightsDownload:
    """A download of the large files of one commit into `blobs`, the folder of the cache that names files by their
    SHA-256.
    """

    def __init__(self, repo: str, commit: str, blobs: Path, tally: DownloadProgress) -> None:
        self._repo, self._commit, self._blobs, self._tally = repo, commit, blobs, tally

    def fetch(self, files: Sequence[LargeFile]) -> None:
        """Download the missing files of `files`, several at once. Raises DownloadFailed, or an error of the hub's
        library.
        """
        self._blobs.mkdir(parents=True, exist_ok=True)
        missing = [(file, self._partial_bytes(file)) for file in files if not (self._blobs / file.sha256).is_file()]
        for file, received in missing:
            self._tally.expect(file.size, received)
        self._check_room(sum(file.size - received for file, received in missing))
        waiting: queue.SimpleQueue[tuple[LargeFile, int]] = queue.SimpleQueue()
        for each in missing:
            waiting.put(each)
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                while True:
                    self._fetch(*waiting.get_nowait())
            except queue.Empty:
                ended.put(None)
            except BaseException as error:
                ended.put(error)

        threads = min(_AT_ONCE, len(missing))
        for _ in range(threads):
            threading.Thread(target=run, name="cortexmlx-download", daemon=True).start()
        for _ in range(threads):
            if (error := take_from(ended)) is not None:
                self._tally.stop()
                raise error

    def _partial(self, file: LargeFile) -> Path:
        return self._blobs / f"{file.sha256}.incomplete"  # the hub's tools know this suffix, and remove such files

    def _partial_bytes(self, file: LargeFile) -> int:
        try:
            size = self._partial(file).stat().st_size
        except OSError:
            return 0
        return size if size <= file.size else 0

    def _check_room(self, needed: int) -> None:
        if needed > shutil.disk_usage(self._blobs).free:
            raise self._no_room(needed)

    def _no_room(self, needed: int) -> DownloadFailed:
        free = format_bytes(shutil.disk_usage(self._blobs).free)
        return DownloadFailed(
            f"the disk is too full for {self._repo}: it takes {format_bytes(needed)} more, and {free} are free in "
            f"{self._blobs}. What has come stays there: free some, or set HF_HOME to a folder on a larger disk, and "
            "try again."
        )

    def _fetch(self, file: LargeFile, counted: int) -> None:
        target = self._blobs / file.sha256
        with self._locked_partial(file) as stream:
            if target.is_file():  # another process was faster
                self._tally.add(file.size - counted)
                self._partial(file).unlink(missing_ok=True)
                return
            try:
                digest = self._receive(file, stream)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise self._no_room(file.size - stream.tell()) from error
                raise
            if digest != file.sha256:
                self._partial(file).unlink()
                raise DownloadFailed(
                    f"{file.name} of {self._repo} came damaged: its SHA-256 is {digest[:12]}..., and not "
                    f"{file.sha256[:12]}... as the hub says. It is not kept: try again."
                )
            self._partial(file).replace(target)

    @contextmanager
    def _locked_partial(self, file: LargeFile) -> Iterator[BinaryIO]:
        """Open the partial file at its end, locked. Wait for another process that downloads the same file."""
        while True:
            with self._partial(file).open("ab", buffering=0) as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._tally.pause(0.2)
                    continue
                if (self._blobs / file.sha256).is_file() or _is_at(stream, self._partial(file)):
                    yield cast(BinaryIO, stream)
                    return

    def _receive(self, file: LargeFile, stream: BinaryIO) -> str:
        """Append the missing bytes of a file to `stream`. Return the SHA-256 of the whole file."""
        if not self._partial_bytes(file):
            stream.truncate(0)
        digest, failures = hashlib.sha256(), 0
        with self._partial(file).open("rb") as written:
            while data := written.read(_READ_BYTES):
                digest.update(data)
                self._tally.add(0)
        while (begin := stream.tell()) < file.size:
            why, wait = "the connection was closed", _FIRST_WAIT_SECONDS * 2**failures
            try:
                for data in self._response(file, begin):
                    stream.write(data)
                    digest.update(data)
                    self._tally.add(len(data))
            except Exception as error:
                if not _is_transient(error):
                    raise
                why, wait = one_line(error), max(wait, _retry_after(error))
            failures = 0 if stream.tell() > begin else failures + 1
            if failures == _TRIES:
                raise DownloadFailed(
                    f"{file.name} of {self._repo} stopped at {format_bytes(stream.tell())} of "
                    f"{format_bytes(file.size)}: {why}. What has come stays: try again to go on there."
                )
            if stream.tell() < file.size:
                self._tally.pause(wait)
        return digest.hexdigest()

    def _response(self, file: LargeFile, begin: int) -> Iterator[bytes]:
        """Yield the bytes of a file from `begin` on, as they arrive."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = hf_hub_url(self._repo, file.name, revision=self._commit)
        # Count and hash the bytes of the file, not those that a proxy may have compressed.
        headers = build_hf_headers() | {"Range": f"bytes={begin}-", "Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            whole = response.status_code != 206
            size = _file_size(response.headers, whole)
            if size is not None and size != file.size:
                raise DownloadFailed(
                    f"the hub sends {size:,} bytes for {file.name} of {self._repo}, which has {file.size:,}: try again "
                    "later."
                )
            skip, left = begin if whole else 0, file.size - begin  # a server that ignores ranges sends the whole file
            for data in response.iter_bytes():
                self._tally.add(0)
                new = data[skip:][:left]
                skip, left = max(skip - len(data), 0), left - len(new)
                if new:
                    yield new


def _file_size(headers: Mapping[str, str], whole: bool) -> int | None:
    """Return the size of the whole file that a response states; None if it states none."""
    stated = headers.get("Content-Length") if whole else headers.get("Content-Range", "").rpartition("/")[2]
    return _parse_count(stated)


def _is_at(stream: FileIO, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_transient(error: Exception) -> bool:
    """Return whether another try may succeed: after a broken connection, or if the hub was busy."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    # The hub's library changes its HTTP package. The error of a broken connection keeps its name.
    return status in _TRANSIENT or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _retry_after(error: Exception) -> float:
    """Return the seconds that the hub asks to wait."""
    stated = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(float(_parse_count(stated) or 0), _MOST_WAIT_SECONDS)


def _parse_count(stated: str | None) -> int | None:
    """Return the number that a header states; None if it states none."""
    return int(stated) if stated and re.fullmatch("[0-9]{1,18}", stated) else None
