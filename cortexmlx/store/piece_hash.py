"""SHA-256 of large sources, piece by piece: threads compute it while whoever wants it does something else."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

PIECE = 8 << 20
"""Bytes that one thread hashes at once."""

THREADS = 4
"""Threads at most. Each hashes 1 to 2 GB/s, so that four are faster than the drive."""


class Source(Protocol):
    """Bytes that are hashed."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def add(self, digest: Any, begin: int, end: int) -> None:
        """Update a digest with the bytes from `begin` to `end`. On any thread. Raises OSError."""
        ...


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._data)

    def add(self, digest: Any, begin: int, end: int) -> None:
        """Update a digest with a part of them."""
        digest.update(self._data[begin:end])


class PieceHash:
    """The digest of each source: SHA-256 over its size and the SHA-256 of each of its pieces.

    Threads begin at once, unless all sources together are less than a piece. `digests` helps them, so it ends although
    no thread could be started. A thread that nobody waits for any more ends after its piece.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._pieces = [[b""] * -(-source.size // PIECE) for source in sources]
        self._next = deque((n, piece) for n, pieces in enumerate(self._pieces) for piece in range(len(pieces)))
        self._open = len(self._next)
        self._error: OSError | None = None
        self._changed = threading.Condition()
        wanted = min(THREADS, os.cpu_count() or 1, self._open) if sum(s.size for s in sources) >= PIECE else 0
        for _ in range(wanted):
            try:
                threading.Thread(target=self._work, name="cortexmlx-hash", daemon=True).start()
            except RuntimeError:  # the system has no thread left
                break

    def digests(self) -> list[bytes]:
        """Wait for the digests, in the order of the sources. Raises OSError if a source cannot be read."""
        self._work()
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._error is not None)
        if self._error is not None:
            raise self._error
        return [
            hashlib.sha256(b"%d:" % source.size + b"".join(pieces)).digest()
            for source, pieces in zip(self._sources, self._pieces, strict=True)
        ]

    def cancel(self) -> None:
        """End the threads, each after its piece. Nobody may wait for digests afterwards."""
        self._next.clear()

    def _work(self) -> None:
        while True:
            try:
                number, piece = self._next.popleft()
            except IndexError:
                return
            source, begin = self._sources[number], piece * PIECE
            digest = hashlib.sha256()
            error: OSError | None = None
            try:
                source.add(digest, begin, min(begin + PIECE, source.size))
            except OSError as raised:
                error = raised
                self._next.clear()
            with self._changed:
                self._pieces[number][piece] = digest.digest()
                self._open -= 1
                self._error = self._error or error
                self._changed.notify_all()
