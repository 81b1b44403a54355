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

from cortexmlx.disk.folder import HASHES, open_regular_file
from cortexmlx.system.machine import lower_thread_priority

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
    """Identity, size and times of a file. Writing to the file changes `changed_ns`, which no program can set."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    def __bytes__(self) -> bytes:
        return "\0".join(map(str, astuple(self))).encode(errors="surrogateescape")


def stamp_of(path: Path) -> FileStamp:
    """Return a file's stamp; opening it makes a network file system look again. Raises OSError if it is not regular."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _stamp_of_open_file(os.path.realpath(path), descriptor)
    finally:
        os.close(descriptor)


def _stamp_of_open_file(path: str, descriptor: int) -> FileStamp:
    """Return the stamp of an open file. Raises OSError if it is no regular file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no file")
    return FileStamp(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class FileHash:
    """The SHA-256 of several files, in order. Threads of low priority hash the files that have no cached hash.

    `get_cache` returns the hashes of earlier runs, or None. It is called again when there are new hashes to keep.

    Make it before anybody else reads the files, and ask for the `digest` after that: then both have read the same.
    """

    def __init__(self, paths: Sequence[Path], get_cache: Callable[[], HashCache | None] = lambda: None) -> None:
        self._paths = paths
        self._get_cache = get_cache
        self._cached_hashes: dict[FileStamp, bytes] = {}
        self._new_stamps: list[FileStamp] = []
        self._hash = PieceHash([])
        try:
            self._stamps: list[FileStamp] | None = _reliable_stamps([stamp_of(path) for path in paths], paths)
        except OSError:
            self._stamps = None
        if self._stamps is not None:
            cache = get_cache()
            self._cached_hashes = {} if cache is None else cache.find(self._stamps)
            self._new_stamps = [stamp for stamp in dict.fromkeys(self._stamps) if stamp not in self._cached_hashes]
            self._hash = PieceHash([_FileSource(stamp) for stamp in self._new_stamps], lower_thread_priority)

    @property
    def is_ready(self) -> bool:
        """Whether `digest` would return at once, without waiting for a thread."""
        return self._hash.is_ready

    @property
    def progress(self) -> float:
        """The share of the bytes that is hashed so far, from 0 to 1."""
        return self._hash.progress

    def when_ready(self, call: Callable[[bytes | None], None]) -> None:
        """Call `call` once with the digest: now if `is_ready`, otherwise on a thread. Never after `cancel`."""
        self._hash.when_ready(lambda: call(self.digest()))

    def digest(self) -> bytes | None:
        """Wait for the hash and return it; None if the files may have changed since this object was made."""
        if self._stamps is None:
            return None
        try:
            new_hashes = dict(zip(self._new_stamps, self._hash.digests(), strict=True))
            if [stamp_of(path) for path in self._paths] != self._stamps:
                return None
        except (OSError, MemoryError):
            return None
        if new_hashes and (cache := self._get_cache()) is not None:
            cache.add(new_hashes)
        hashes = self._cached_hashes | new_hashes
        return hashlib.sha256(b"".join(hashes[stamp] for stamp in self._stamps)).digest()

    def cancel(self) -> None:
        """Stop hashing. `digest` must not be called afterwards."""
        self._hash.cancel()


def _reliable_stamps(stamps: list[FileStamp], paths: Sequence[Path]) -> list[FileStamp] | None:
    """Return stamps taken late enough that any later write changes them; None if file times are too coarse."""
    if any(time.time_ns() - stamp.changed_ns < _TICK * 1e9 for stamp in stamps):
        time.sleep(_TICK)
        stamps = [stamp_of(path) for path in paths]
    now = time.time_ns()
    exact = all(s.changed_ns % _COARSE_NS and now - s.changed_ns >= _TICK * 1e9 for s in stamps)
    return stamps if exact else None


class _FileSource:
    """A file to hash, which must still have a given stamp.

    Before the file is read, writes through memory mappings are brought to disk. Writing to a page that is dirty already
    changes no time of the file, so otherwise such a write would go unnoticed.
    """

    def __init__(self, stamp: FileStamp) -> None:
        self._stamp = stamp
        self._is_synced = False
        self._sync_lock = threading.Lock()

    @property
    def size(self) -> int:
        """The file's size in bytes, when its `FileStamp` was taken."""
        return self._stamp.size

    def hash_range(self, digest: Any, begin: int, end: int) -> None:
        """Update a digest with the file's bytes from `begin` to `end`. Raises OSError if the file has changed."""
        descriptor = os.open(self._stamp.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            self._sync(descriptor)
            if _stamp_of_open_file(self._stamp.path, descriptor) != self._stamp:
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
        """Write dirty pages of memory mappings to disk, once, so that the change time is right."""
        with self._sync_lock:
            if not self._is_synced:
                with contextlib.suppress(OSError):  # a file system that nobody can write to
                    os.fsync(descriptor)
                self._is_synced = True


# The hashes of weight files, kept in a file of the store's folder.


_MAX_LINES = 1000
"""How many hashes are kept: the newest."""

_LINE = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{32})")
_LINE_BYTES = 32 + 64 + 32 + 3

Stamped = TypeVar("Stamped", bound=SupportsBytes)


class HashCache:
    """Hashes of files by their stamps, cached in a file of the store's folder.

    Each line has a proof that needs the folder's secret, so damaged or foreign lines are ignored. The file is replaced
    as a whole: if two processes add at once, one may lose what it added. Nothing here raises.
    """

    def __init__(self, folder: Path, secret: bytes) -> None:
        self._folder = folder
        self._secret = secret

    def find(self, stamps: Iterable[Stamped]) -> dict[Stamped, bytes]:
        """Return the cached hash of each stamp that has one."""
        lines = self._read_hashes()
        names = {stamp: self._keyed_hash(b"stamp", bytes(stamp)) for stamp in stamps}
        return {stamp: lines[name] for stamp, name in names.items() if name in lines}

    def add(self, hashes: Mapping[Stamped, bytes]) -> None:
        """Add hashes of 32 bytes to the cache file, which keeps the newest 1000."""
        lines = self._read_hashes()
        for stamp, digest in hashes.items():
            name = self._keyed_hash(b"stamp", bytes(stamp))
            lines.pop(name, None)
            lines[name] = digest
        newest_lines = list(lines.items())[-_MAX_LINES:]
        text = b"".join(b"%s %s %s\n" % (n, d.hex().encode(), self._line_proof(n, d)) for n, d in newest_lines)
        temporary_path = self._folder / f"{secrets.token_hex(16)}.unfinished"
        with contextlib.suppress(OSError):
            descriptor = os.open(temporary_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                temporary_path.replace(self._folder / HASHES)
            finally:
                temporary_path.unlink(missing_ok=True)

    def _read_hashes(self) -> dict[bytes, bytes]:
        """Read the cache file. Return the hash of each name, the oldest first."""
        try:
            with open_regular_file(self._folder / HASHES) as file:
                text = file.read(_MAX_LINES * _LINE_BYTES)
        except OSError:
            return {}
        lines = {}
        for match in map(_LINE.fullmatch, text.split(b"\n")):
            if match is not None:
                name, digest = match[1], bytes.fromhex(match[2].decode())
                if secrets.compare_digest(match[3], self._line_proof(name, digest)):
                    lines[name] = digest
        return lines

    def _line_proof(self, name: bytes, digest: bytes) -> bytes:
        """Return the keyed hash that proves that a line was written with this folder's secret."""
        return self._keyed_hash(b"line", name + digest)

    def _keyed_hash(self, use: bytes, data: bytes) -> bytes:
        """Return a hash of `data` with the folder's secret as key, as hexadecimal digits."""
        return hashlib.blake2b(data, key=self._secret, person=use, digest_size=16).hexdigest().encode()


# SHA-256 of large files and arrays, piece by piece, on background threads.


PIECE = 8 << 20
"""Bytes that one thread hashes at a time."""

THREADS = 4
"""How many threads there are at most. Each hashes 1 to 2 GB/s, so four are faster than a drive."""


class HashSource(Protocol):
    """Bytes to hash: a file or an array."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        ...

    def hash_range(self, digest: Any, begin: int, end: int) -> None:
        """Update a digest with the bytes from `begin` to `end`. Any thread may call it. Raises OSError."""
        ...


class BytesSource:
    """Bytes in memory to hash."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self._data)

    def hash_range(self, digest: Any, begin: int, end: int) -> None:
        """Update a digest with the bytes from `begin` to `end`."""
        digest.update(self._data[begin:end])


class PieceHash:
    """SHA-256 digests of several sources, hashed in pieces on threads. A digest covers the size and each piece's
    SHA-256.

    Threads begin at once, each with a call of `prepare`, unless all sources together are smaller than a piece.
    `digests` helps them, so it ends even if no thread could be started. A cancelled thread ends after its piece.
    """

    def __init__(self, sources: Sequence[HashSource], prepare: Callable[[], None] = lambda: None) -> None:
        self._sources = sources
        self._prepare = prepare
        self._piece_digests = [[b""] * -(-source.size // PIECE) for source in sources]
        self._pending_pieces = deque(
            (n, piece_index) for n, digests in enumerate(self._piece_digests) for piece_index in range(len(digests))
        )
        self._open_piece_count = len(self._pending_pieces)
        self._total_bytes = self._remaining_bytes = sum(source.size for source in sources)
        self._error: OSError | MemoryError | None = None
        self._call: Callable[[], None] | None = None
        self._threads = 0
        self._condition = threading.Condition()
        thread_count = min(THREADS, os.cpu_count() or 1, self._open_piece_count) if self._total_bytes >= PIECE else 0
        for _ in range(thread_count):
            try:
                threading.Thread(target=self._run_thread, name="cortexmlx-hash", daemon=True).start()
            except RuntimeError:  # the system has no thread left
                break
            self._threads += 1

    @property
    def is_ready(self) -> bool:
        """Whether `digests` would return at once, without waiting for a thread."""
        return not self._threads or self._is_done

    @property
    def progress(self) -> float:
        """The share of the bytes that is hashed so far, from 0 to 1."""
        return 1 - self._remaining_bytes / self._total_bytes if self._total_bytes else 1.0

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call `call` once: now if `is_ready`, otherwise on the last thread. Never after `cancel`."""
        with self._condition:
            if not self.is_ready:
                self._call = call
                return
        call()

    def digests(self) -> list[bytes]:
        """Wait for and return the digests in source order. Raises OSError or MemoryError if a source cannot be read."""
        self._hash_pieces()
        with self._condition:
            self._condition.wait_for(lambda: self._is_done)
        if self._error is not None:
            raise self._error
        return [
            hashlib.sha256(b"%d:" % source.size + b"".join(piece_digests)).digest()
            for source, piece_digests in zip(self._sources, self._piece_digests, strict=True)
        ]

    def cancel(self) -> None:
        """Stop the threads, each after its piece. `digests` must not be called afterwards."""
        self._pending_pieces.clear()
        self._call = None

    @property
    def _is_done(self) -> bool:
        """Whether all pieces are hashed, or one could not be read."""
        return not self._open_piece_count or self._error is not None

    def _run_thread(self) -> None:
        """Call `prepare`, then hash pieces: the target of each thread."""
        self._prepare()
        self._hash_pieces()

    def _hash_pieces(self) -> None:
        """Hash pieces until none is left."""
        while True:
            try:
                source_index, piece_index = self._pending_pieces.popleft()
            except IndexError:
                return
            source, begin = self._sources[source_index], piece_index * PIECE
            digest = hashlib.sha256()
            error: OSError | MemoryError | None = None
            end = min(begin + PIECE, source.size)
            try:
                source.hash_range(digest, begin, end)
            except (OSError, MemoryError) as raised:
                error = raised
                self._pending_pieces.clear()
            with self._condition:
                self._piece_digests[source_index][piece_index] = digest.digest()
                self._open_piece_count -= 1
                self._remaining_bytes -= end - begin
                self._error = self._error or error
                self._condition.notify_all()
                call = self._call if self._is_done else None
                if call is not None:
                    self._call = None
            if call is not None:
                call()
