"""Hashing in pieces: the same digest however many threads there are, and another one for any other bytes."""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any

import pytest

from cortexmlx.disk import hashes as piece_hash
from cortexmlx.disk.hashes import BytesSource, PieceHash
from support.patience import PATIENCE, soon

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


@pytest.mark.parametrize("error", [OSError("the drive is gone"), MemoryError("no buffer")])
def test_what_cannot_be_read_is_an_error_and_ends_all(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        size = 5000

        def hash_range(self, digest: Any, begin: int, end: int) -> None:
            if begin == 3000:
                raise error

    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    with pytest.raises(type(error), match=str(error)):
        PieceHash([Broken(), Broken()]).digests()
    calls: list[threading.Thread] = []
    PieceHash([Broken(), Broken()]).when_ready(lambda: calls.append(threading.current_thread()))
    assert soon(lambda: calls) and len(calls) == 1


class Held:
    """Bytes of which no piece is hashed before `goes_on`."""

    size = 5000

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def hash_range(self, digest: Any, begin: int, end: int) -> None:
        assert self.goes_on.wait(PATIENCE)


def test_who_does_not_wait_is_called_once_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    held, calls = Held(), []
    hashed = PieceHash([held])
    assert not hashed.is_ready and hashed.progress == 0.0
    hashed.when_ready(lambda: calls.append(threading.current_thread()))
    assert not calls
    held.goes_on.set()
    assert soon(lambda: calls) and calls != [threading.current_thread()]
    assert hashed.is_ready and hashed.progress == 1.0 and len(hashed.digests()) == 1
    hashed.when_ready(lambda: calls.append(threading.current_thread()))
    assert calls[1:] == [threading.current_thread()], "it is known"


def test_what_is_cancelled_calls_nobody_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    before, held, calls = threading.active_count(), Held(), []
    hashed = PieceHash([held, BytesSource(memoryview(bytes(9000)))])
    hashed.when_ready(lambda: calls.append(1))
    hashed.cancel()
    held.goes_on.set()
    assert soon(lambda: threading.active_count() <= before) and not calls


def test_threads_that_cannot_be_started_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    monkeypatch.setattr("threading.Thread.start", refused)
    hashed, calls = PieceHash([BytesSource(memoryview(bytes(5000)))]), []
    hashed.when_ready(lambda: calls.extend(hashed.digests()))
    assert calls == [judged(bytes(5000), 1000)]
