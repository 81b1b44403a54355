"""Hashes of files, kept until their size, inode or change time differ."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from cortexmlx.disk.kept_hashes import KeptHashes
from cortexmlx.disk.piece_hash import PieceHash
from cortexmlx.system.machine import be_modest

_BUFFER = 1 << 20

_TICK = 0.02
"""Seconds. Two changes of a file that are closer together may have the same time, since kernels count in steps of 1 to
10 ms.
"""

_COARSE_NS = 10_000_000
"""A change time that is a multiple of this comes from a file system that counts in hundredths of a second or in whole
seconds, as FAT does. There a file may change and keep its times.
"""


@dataclass(frozen=True)
class FileStamp:
    """What the file system says of a file. Writing to the file changes `changed_ns`, which no program can set."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    def __bytes__(self) -> bytes:
        return "\0".join(map(str, astuple(self))).encode(errors="surrogateescape")


def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of a file. Opening the file makes a network file system look again. Raises OSError if it is no
    regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _stamp(os.path.realpath(path), descriptor)
    finally:
        os.close(descriptor)


def _stamp(path: str, descriptor: int) -> FileStamp:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file")
    return FileStamp(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FileHash:
    """The hash of several files, in order. Threads of low priority begin to compute it at once, for files whose hash is
    not kept.

    `kept` returns the hashes of earlier runs, or None. It is called again when there are new hashes to keep.

    Make it before anybody else reads the files, and ask for the `digest` after that: then both have read the same.
    """

    def __init__(self, paths: Sequence[Path], kept: Callable[[], KeptHashes | None] = lambda: None) -> None:
        self._paths = paths
        self._kept = kept
        self._found: dict[FileStamp, bytes] = {}
        self._new: list[FileStamp] = []
        self._hash = PieceHash([])
        try:
            self._stamps: list[FileStamp] | None = _settled([stamp_of(path) for path in paths], paths)
        except OSError:
            self._stamps = None
        if self._stamps is not None:
            known = kept()
            self._found = {} if known is None else known.find(self._stamps)
            self._new = [stamp for stamp in dict.fromkeys(self._stamps) if stamp not in self._found]
            self._hash = PieceHash([_FileSource(stamp) for stamp in self._new], be_modest)

    @property
    def ready(self) -> bool:
        """Whether `digest` waits for no thread."""
        return self._hash.ready

    @property
    def share(self) -> float:
        """Which part of the bytes to read is hashed, from 0 to 1."""
        return self._hash.share

    def when_ready(self, call: Callable[[bytes | None], None]) -> None:
        """Have `call` called once with the digest: here and now if it is `ready`, otherwise by a thread. After `cancel`
        it is not called.
        """
        self._hash.when_ready(lambda: call(self.digest()))

    def digest(self) -> bytes | None:
        """Wait for the hash and return it. None if it is not certain that the files are what they were when this was
        made.
        """
        if self._stamps is None:
            return None
        try:
            new = dict(zip(self._new, self._hash.digests(), strict=True))
            if [stamp_of(path) for path in self._paths] != self._stamps:
                return None
        except (OSError, MemoryError):
            return None
        if new and (known := self._kept()) is not None:
            known.add(new)
        found = self._found | new
        return hashlib.sha256(b"".join(found[stamp] for stamp in self._stamps)).digest()

    def cancel(self) -> None:
        """End the threads. Do not ask for the digest afterwards."""
        self._hash.cancel()


def _settled(stamps: list[FileStamp], paths: Sequence[Path]) -> list[FileStamp] | None:
    """Return the stamps of files, taken later than the clock tick in which the files were written. None if the file
    system's times are too coarse.
    """
    if any(time.time_ns() - stamp.changed_ns < _TICK * 1e9 for stamp in stamps):
        time.sleep(_TICK)
        stamps = [stamp_of(path) for path in paths]
    now = time.time_ns()
    exact = all(s.changed_ns % _COARSE_NS and now - s.changed_ns >= _TICK * 1e9 for s in stamps)
    return stamps if exact else None


class _FileSource:
    """A file, as long as it has this stamp.

    Before the file is read, writes through memory mappings are brought to disk. Writing to a page that is dirty already
    changes no time of the file, so otherwise such a write would go unnoticed.
    """

    def __init__(self, stamp: FileStamp) -> None:
        self._stamp = stamp
        self._synced = False
        self._syncing = threading.Lock()

    @property
    def size(self) -> int:
        """Its bytes, as the stamp says."""
        return self._stamp.size

    def add(self, digest: Any, begin: int, end: int) -> None:
        """Read a part of the file into a digest. Raises OSError if the file has changed."""
        descriptor = os.open(self._stamp.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            self._sync(descriptor)
            if _stamp(self._stamp.path, descriptor) != self._stamp:
                raise OSError(f"{self._stamp.path} has changed")
            file.seek(begin)
            buffer = memoryview(bytearray(min(_BUFFER, end - begin)))
            while begin < end:
                count = file.readinto(buffer[: end - begin])
                if not count:
                    raise OSError(f"{self._stamp.path} ends too soon")
                digest.update(buffer[:count])
                begin += count

    def _sync(self, descriptor: int) -> None:
        with self._syncing:
            if not self._synced:
                with contextlib.suppress(OSError):  # a file system that nobody can write to
                    os.fsync(descriptor)
                self._synced = True
