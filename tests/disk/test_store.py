"""A store for one engine: what is offered is there for the next, in the time that closing may take."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.disk import connector as disks
from cortexmlx.disk.connector import StoreConnector
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.segments import Record
from cortexmlx.disk.store import KVStore, ReadRequest, make_segment_store, start_store
from cortexmlx.errors import InvalidRequest
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon
from support.store.records import record, same
from support.store.stored import Stored

RECORDS = [record(n) for n in range(6)]


def store(path: Path) -> KVStore:
    segment_store = make_segment_store(path, 1 << 30)
    assert isinstance(segment_store, SegmentStore)
    return KVStore(segment_store, "model")


def test_the_next_store_reads_what_the_last_was_closed_with(tmp_path: Path) -> None:
    one = store(tmp_path)
    assert one.writer.has_room and one.writer.enqueue(RECORDS)
    one.close(PATIENCE)
    assert one.stats().stored_blocks == 6
    other = store(tmp_path)
    assert other._segments.secret == one._segments.secret
    done = threading.Event()
    found: dict[bytes, Record] = {}
    tokens = {r.key: r.tokens for r in RECORDS}

    def arrived(got: dict[bytes, Record]) -> None:
        found.update(got)
        done.set()

    other.reader.submit(ReadRequest(tokens, lambda there, rate: list(there), arrived, PATIENCE))
    assert done.wait(PATIENCE) and all(same(found[r.key], r) for r in RECORDS)
    other.count_dropped(3)
    other.close()
    said = other.stats()
    assert (said.read_blocks, said.missed_blocks, said.dropped_blocks) == (6, 0, 3)
    assert said.read_bytes == sum(r.nbytes for r in RECORDS) and said.path == str(tmp_path)


def test_a_folder_that_cannot_be_used_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    why = make_segment_store(tmp_path / "file" / "store", 1 << 30)
    assert isinstance(why, str) and "Not a directory" in why
    assert len(caplog.records) == 1 and "cannot be used" in caplog.text


@pytest.mark.parametrize("given", range(3))
def test_a_store_without_threads_is_said_and_leaves_none(
    given: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system gives fewer than the three that it takes."""
    segment_store = make_segment_store(tmp_path, 1 << 30)
    assert isinstance(segment_store, SegmentStore)
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if len(begun) == given:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert isinstance(start_store(segment_store, "model", lambda: None), str)
    for thread in begun:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in begun) and "can't start new thread" in caplog.text


def test_a_store_in_use_begins_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used on the engine's thread, where one that cannot be begun would end every request."""
    one = store(tmp_path)

    def refuse(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread} is begun")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert one.writer.enqueue(RECORDS) and one.writer.flush(PATIENCE)
    done = threading.Event()
    tokens = {r.key: r.tokens for r in RECORDS}
    one.reader.submit(ReadRequest(tokens, lambda there, rate: list(there), lambda got: done.set(), PATIENCE))
    assert done.wait(PATIENCE) and one.may_have(RECORDS[0].key) and not one.may_have(b"?" * 16)
    one.close()


# -- The engine's side of a store: how much it copies between two steps, and what is left when it closes --------------


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
