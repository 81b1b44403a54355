"""SHA-256 of large files and arrays, piece by piece, on background threads."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
