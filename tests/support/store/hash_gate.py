"""A gate before the hash of weight files, so that an engine is open while its weights are hashed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cortexmlx.disk import hashes as file_hash
from cortexmlx.disk import hashes as piece_hash
from support.patience import PATIENCE


class Gate:
    """No piece of a file is hashed before it is `opened`. `error` is what hashing raises then."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.error: Exception | None = None


@contextmanager
def hash_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate that is shut. The smallest models are hashed by threads, too."""
    gate, add = Gate(), file_hash._FileSource.hash_range

    def waits(source: Any, digest: Any, begin: int, end: int) -> None:
        assert gate.opened.wait(PATIENCE)
        if gate.error is not None:
            raise gate.error
        add(source, digest, begin, end)

    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    monkeypatch.setattr(file_hash._FileSource, "hash_range", waits)
    try:
        yield gate
    finally:
        gate.opened.set()
