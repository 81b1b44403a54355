"""Hashing in pieces: the same digest however many threads there are, and another one for any other bytes."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest

from cortexmlx.store import piece_hash
from cortexmlx.store.piece_hash import BytesSource, PieceHash

PARTS = [os.urandom(n) for n in (0, 1, 999, 1000, 1001, 5003)]


def digests(parts: list[bytes]) -> list[bytes]:
    return PieceHash([BytesSource(memoryview(part)) for part in parts]).digests()


def judged(part: bytes, piece: int) -> bytes:
    pieces = [part[i : i + piece] for i in range(0, len(part), piece)]
    return hashlib.sha256(b"%d:" % len(part) + b"".join(hashlib.sha256(p).digest() for p in pieces)).digest()


def test_small_sources_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Thread", None)
    assert digests(PARTS) == [judged(part, piece_hash.PIECE) for part in PARTS]


def test_threads_find_what_hashlib_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    assert digests(PARTS) == [judged(part, 1000) for part in PARTS]


def test_it_ends_although_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    monkeypatch.setattr("threading.Thread.start", refused)
    assert digests(PARTS) == [judged(part, 1000) for part in PARTS]


def test_what_cannot_be_read_is_an_error_and_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        size = 5000

        def add(self, digest: Any, begin: int, end: int) -> None:
            if begin == 3000:
                raise OSError("the drive is gone")

    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    with pytest.raises(OSError, match="the drive is gone"):
        PieceHash([Broken(), Broken()]).digests()
