"""Which pieces of a store are taken, and how long a prompt waits for them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from support.models.tiny import tokens_of
from support.patience import PATIENCE
from support.store.stored import Stored

LONG = tokens_of(330, seed=4)


def test_pieces_of_other_shapes_are_not_taken(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        right = driver.ask(LONG)[0]
        driver.forget()
        assert driver.core.disk is not None
        ((shape, _), *others), *groups = driver.core.disk._shapes  # type: ignore[attr-defined]
        monkeypatch.setattr(driver.core.disk, "_shapes", [((shape, "<f2"), *others), *groups])
        assert driver.ask(LONG) == (right, 0)


def test_a_prompt_does_not_wait_for_a_disk_that_stands_still(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        right = driver.ask(LONG)[0]
    monkeypatch.setattr("cortexmlx.disk.connector.MIN_DISK_WAIT_SECONDS", 0.1)
    goes_on = threading.Event()
    monkeypatch.setattr("os.pread", lambda *_: (goes_on.wait(PATIENCE), b"")[1])
    with Stored(tiny("llama"), tmp_path) as driver:
        assert driver.ask(LONG) == (right, 0)
        goes_on.set()
