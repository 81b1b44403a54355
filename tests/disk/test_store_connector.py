"""The engine's side of a store: how much it copies between two steps, and what is left when it closes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.disk import connector as disks
from cortexmlx.disk.connector import StoreConnector
from cortexmlx.errors import InvalidRequest
from support.models.tiny import tokens_of
from support.patience import soon
from support.store.stored import Stored

LONG = tokens_of(330, seed=4)


class Clock:
    """Every look at it takes `look` seconds."""

    def __init__(self) -> None:
        self.now, self.look = 0.0, 0.001

    def __call__(self) -> float:
        self.now += self.look
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(disks.time, "perf_counter", made)
    return made


def full(driver: Stored, monkeypatch: pytest.MonkeyPatch) -> StoreConnector:
    """Something is cached, and nothing of it is copied yet."""
    with monkeypatch.context() as patched:
        patched.setattr(disks, "COPY_SHARE", 0.0)
        driver.ask(LONG)
    assert driver.core.disk is not None and waiting(driver.core.disk) > 2 * disks._ENTRIES_PER_COPY
    return driver.core.disk


def waiting(disk: StoreConnector) -> int:
    assert disk._tier is not None
    return len(disk._tier)


def test_running_requests_give_a_fiftieth_of_their_time(
    tiny: Any, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying some entries takes a look at the clock, 4 ms here: in a second that is 5 times, and one to begin with."""
    clock.look = 0.004
    with Stored(tiny("llama"), tmp_path) as driver:
        disk = full(driver, monkeypatch)
        before = waiting(disk)
        for _ in range(20):
            clock.now += 0.05 - 2 * clock.look
            disk.copy_between_steps(10.0)
        assert 4 * disks._ENTRIES_PER_COPY <= before - waiting(disk) <= 6 * disks._ENTRIES_PER_COPY < before


def test_a_short_step_is_not_made_much_longer(
    tiny: Any, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        disk = full(driver, monkeypatch)
        clock.now += 100
        before = waiting(disk)
        disk.copy_between_steps(0.02)  # a tenth of it are two looks
        assert before - 2 * disks._ENTRIES_PER_COPY <= waiting(disk) < before


def test_a_queue_that_is_full_is_not_waited_for(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        disk = full(driver, monkeypatch)
        before = waiting(disk)
        with monkeypatch.context() as patched:
            patched.setattr(type(disk._store.writer), "has_room", False)
            assert not driver.core.tidy() and waiting(disk) == before
        assert driver.core.tidy() or not waiting(disk)


def test_closing_stores_what_is_cached(tiny: Any, tmp_path: Path) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
    with Stored(tiny("llama"), tmp_path) as driver:
        assert driver.ask(LONG)[1] == 328


def test_an_engine_that_cannot_begin_leaves_no_threads(tiny: Any, tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidRequest, match="keep_last"):
        Stored(tiny("llama"), tmp_path, keep_last=10**9)
    assert soon(lambda: threading.active_count() <= before)
