"""Hashes of files, kept until their size, inode or change time differ."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol, SupportsBytes, TypeVar

from cortexmlx.disk.folder import HASHES, open_plain
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


# The hashes of weight files, kept in a file of the store's folder.


_MOST = 1000
"""How many hashes are kept: the newest."""

_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{32})")
_LINE_BYTES = 32 + 64 + 32 + 3

Stamped = TypeVar("Stamped", bound=SupportsBytes)


class KeptHashes:
    """Hashes by stamp. A stamp is what the file system says of a file, as bytes.

    Each line has a proof that needs the folder's secret, so damaged or foreign lines are ignored. The file is replaced
    as a whole: if two processes add at once, one may lose what it added. Nothing here raises.
    """

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._folder = folder
        self._secret = secret

    def find(self, stamps: Iterable[Stamped]) -> dict[Stamped, bytes]:
        """Return the hashes of those stamps that are known."""
        lines = self._lines()
        names = {stamp: self._keyed(b"stamp", bytes(stamp)) for stamp in stamps}
        return {stamp: lines[name] for stamp, name in names.items() if name in lines}

    def add(self, hashes: Mapping[Stamped, bytes]) -> None:
        """Keep hashes of 32 bytes."""
        lines = self._lines()
        for stamp, digest in hashes.items():
            name = self._keyed(b"stamp", bytes(stamp))
            lines.pop(name, None)
            lines[name] = digest
        newest = list(lines.items())[-_MOST:]
        text = b"".join(b"%s %s %s\n" % (n, d.hex().encode(), self._proof(n, d)) for n, d in newest)
        unfinished = self._folder / f"{secrets.token_hex(16)}.unfinished"
        with contextlib.suppress(OSError):
            descriptor = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                unfinished.replace(self._folder / HASHES)
            finally:
                unfinished.unlink(missing_ok=True)

    def _lines(self) -> dict[bytes, bytes]:
        """Return the hash of each name, the oldest first."""
        try:
            with open_plain(self._folder / HASHES) as file:
                text = file.read(_MOST * _LINE_BYTES)
        except OSError:
            return {}
        lines = {}
        for found in map(_LINE.fullmatch, text.split(b"\n")):
            if found is not None:
                name, digest = found[1], bytes.fromhex(found[2].decode())
                if secrets.compare_digest(found[3], self._proof(name, digest)):
                    lines[name] = digest
        return lines

    def _proof(self, name: bytes, digest: bytes) -> bytes:
        return self._keyed(b"line", name + digest)

    def _keyed(self, use: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._secret, person=use, digest_size=16).hexdigest().encode()


# SHA-256 of large files and arrays, piece by piece, on background threads.


PIECE = 8 << 20
"""Bytes that one thread hashes at a time."""

THREADS = 4
"""How many threads there are at most. Each hashes 1 to 2 GB/s, so four are faster than a drive."""


class Source(Protocol):
    """Bytes to hash."""

    @property
    def size(self) -> int:
        """How many bytes there are."""
        ...

    def add(self, digest: Any, begin: int, end: int) -> None:
        """Update a digest with the bytes from `begin` to `end`. Any thread may call it. Raises OSError."""
        ...


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return len(self._data)

    def add(self, digest: Any, begin: int, end: int) -> None:
        """Update a digest with the bytes from `begin` to `end`."""
        digest.update(self._data[begin:end])


class PieceHash:
    """The digest of each source: SHA-256 over its size and the SHA-256 of each of its pieces.

    Threads begin at once, each with a call of `prepare`, unless all sources together are smaller than a piece.
    `digests` helps them, so it ends even if no thread could be started. A cancelled thread ends after its piece.
    """

    def __init__(self, sources: Sequence[Source], prepare: Callable[[], None] = lambda: None) -> None:
        self._sources = sources
        self._prepare = prepare
        self._pieces = [[b""] * -(-source.size // PIECE) for source in sources]
        self._next = deque((n, piece) for n, pieces in enumerate(self._pieces) for piece in range(len(pieces)))
        self._open = len(self._next)
        self._bytes = self._left = sum(source.size for source in sources)
        self._error: OSError | MemoryError | None = None
        self._call: Callable[[], None] | None = None
        self._threads = 0
        self._changed = threading.Condition()
        wanted = min(THREADS, os.cpu_count() or 1, self._open) if self._bytes >= PIECE else 0
        for _ in range(wanted):
            try:
                threading.Thread(target=self._run, name="cortexmlx-hash", daemon=True).start()
            except RuntimeError:  # the system has no thread left
                break
            self._threads += 1

    @property
    def ready(self) -> bool:
        """Whether `digests` waits for no thread."""
        return not self._threads or self._over

    @property
    def share(self) -> float:
        """Which part of the bytes is hashed, from 0 to 1."""
        return 1 - self._left / self._bytes if self._bytes else 1.0

    def when_ready(self, call: Callable[[], None]) -> None:
        """Have `call` called once: here and now if it is `ready`, otherwise by the last thread. After `cancel` it is
        not called.
        """
        with self._changed:
            if not self.ready:
                self._call = call
                return
        call()

    def digests(self) -> list[bytes]:
        """Wait for the digests, and return them in the order of the sources. Raises OSError or MemoryError if a source
        cannot be read.
        """
        self._work()
        with self._changed:
            self._changed.wait_for(lambda: self._over)
        if self._error is not None:
            raise self._error
        return [
            hashlib.sha256(b"%d:" % source.size + b"".join(pieces)).digest()
            for source, pieces in zip(self._sources, self._pieces, strict=True)
        ]

    def cancel(self) -> None:
        """End the threads, each after its piece. Do not wait for digests afterwards."""
        self._next.clear()
        self._call = None

    @property
    def _over(self) -> bool:
        return not self._open or self._error is not None

    def _run(self) -> None:
        self._prepare()
        self._work()

    def _work(self) -> None:
        while True:
            try:
                number, piece = self._next.popleft()
            except IndexError:
                return
            source, begin = self._sources[number], piece * PIECE
            digest = hashlib.sha256()
            error: OSError | MemoryError | None = None
            end = min(begin + PIECE, source.size)
            try:
                source.add(digest, begin, end)
            except (OSError, MemoryError) as raised:
                error = raised
                self._next.clear()
            with self._changed:
                self._pieces[number][piece] = digest.digest()
                self._open -= 1
                self._left -= end - begin
                self._error = self._error or error
                self._changed.notify_all()
                call = self._call if self._over else None
                if call is not None:
                    self._call = None
            if call is not None:
                call()
