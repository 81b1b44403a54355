"""The writer takes what there is room for and drops the rest; the reader reads what is wanted, up to what is wrong."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cortexmlx.disk import store as threads
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.store import KVStore, ReadRequest, RecordReader, RecordWriter
from support.patience import PATIENCE, soon
from support.store.records import key_of, opened, read_all, record

RECORDS = [record(n) for n in range(6)]


@pytest.fixture
def segment_store(tmp_path: Path) -> Iterator[SegmentStore]:
    yield SegmentStore(tmp_path, 1 << 30)


def test_many_records_become_few_segments(segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINGER_SECONDS", "MAX_LINGER"):
        monkeypatch.setattr(threads, name, PATIENCE)
    writer = RecordWriter(segment_store, "model", lambda: None)
    assert all(writer.enqueue([each]) for each in RECORDS) and writer.flush(PATIENCE)
    assert (writer.stored_records, writer.dropped_records) == (6, 0) and writer.stored_bytes == sum(
        r.nbytes for r in RECORDS
    )
    assert 1 <= len(segment_store.segments()) <= 2 and len(read_all(segment_store, RECORDS)) == 6
    writer.stop(PATIENCE)


def test_a_small_store_has_small_segments_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    size = RECORDS[0].nbytes
    segment_store = SegmentStore(tmp_path, 6 * size)
    writer = RecordWriter(segment_store, "model", lambda: None)
    assert writer.enqueue(RECORDS) and writer.flush(PATIENCE)
    assert len(segment_store.segments()) > 1 and 0 < len(read_all(segment_store, RECORDS)) <= 6
    segment_store.limit = size - 1
    assert writer.enqueue([record(77)]) and writer.flush(PATIENCE)
    assert (writer.stored_records, writer.dropped_records) == (6, 1)
    writer.stop(PATIENCE)


def test_what_trickles_in_without_end_is_written_all_the_same(
    segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "LINGER_SECONDS", PATIENCE)
    monkeypatch.setattr(threads, "MAX_LINGER", 0.05)
    writer = RecordWriter(segment_store, "model", lambda: None)
    numbers = count()
    assert soon(lambda: writer.enqueue([record(next(numbers))]) and writer.stored_records)
    writer.stop(PATIENCE)


def test_a_queue_that_is_full_drops_and_says_when_there_is_room(
    segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = RECORDS[0].nbytes
    monkeypatch.setattr(threads, "MAX_WAITING", 2 * size)
    monkeypatch.setattr(threads, "SEGMENT_BYTES", size)
    go, room = threading.Event(), threading.Event()
    write = segment_store.write
    monkeypatch.setattr(segment_store, "write", lambda *args: go.wait(PATIENCE) and write(*args))
    writer = RecordWriter(segment_store, "model", room.set)
    taken = [writer.enqueue([each]) for each in RECORDS]
    assert taken[:3] == [True] * 3 and not all(taken) and writer.dropped_records == taken.count(False)
    assert not writer.has_room and not room.is_set()
    go.set()
    assert room.wait(PATIENCE) and writer.flush(PATIENCE) and writer.has_room
    assert writer.stored_records == taken.count(True)
    writer.stop(PATIENCE)


def test_stop_drops_what_takes_too_long(segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(segment_store, "open", lambda: go.wait(PATIENCE))
    writer = RecordWriter(segment_store, "model", lambda: None)
    writer.enqueue(RECORDS)
    writer.stop(0.05)
    assert writer.dropped_records == 6
    go.set()


def test_a_disk_that_refuses_is_left_alone_for_a_while(
    segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def refuse(*args: object) -> int:
        calls.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_store, "write", refuse)
    monkeypatch.setattr(threads, "_PAUSE", PATIENCE)
    writer = RecordWriter(segment_store, "model", lambda: None)
    for each in RECORDS:
        writer.enqueue([each])
        assert writer.flush(PATIENCE)
    assert len(calls) == 1 and writer.dropped_records == 6 and len(caplog.records) == 1
    assert "No space" in caplog.text
    writer.stop(PATIENCE)


def ask(
    reader: RecordReader, tokens: dict[bytes, tuple[int, ...]], wanted: list[bytes], seconds: float = PATIENCE
) -> tuple[dict[bytes, int], set[bytes]]:
    done = threading.Event()
    sizes: dict[bytes, int] = {}
    found: set[bytes] = set()

    def choose(there: object, rate: float) -> list[bytes]:
        assert isinstance(there, dict) and rate > 0
        sizes.update(there)
        return wanted

    reader.submit(ReadRequest(tokens, choose, lambda records: (found.update(records), done.set()), seconds))  # type: ignore[arg-type]
    assert done.wait(PATIENCE)
    return sizes, found


def test_the_reader_reads_up_to_the_first_that_is_wrong(segment_store: SegmentStore) -> None:
    segment_store.open()
    segment_store.write("model", RECORDS)
    reader = RecordReader(segment_store)
    tokens = {r.key: r.tokens for r in RECORDS} | {key_of(77): (1,) * 8}
    sizes, found = ask(reader, tokens, [r.key for r in RECORDS[:4]])
    assert sizes == {r.key: r.nbytes for r in RECORDS} and found == {r.key for r in RECORDS[:4]}
    assert (reader.read_records, reader.missed_records) == (4, 1)
    _, found = ask(reader, tokens | {RECORDS[1].key: (9,) * 8}, [r.key for r in RECORDS[:4]])
    assert found == {RECORDS[0].key}
    reader.stop(PATIENCE)


def test_whatever_is_wrong_is_an_answer_without_records(
    segment_store: SegmentStore, caplog: pytest.LogCaptureFixture
) -> None:
    segment_store.open()
    reader = RecordReader(segment_store)
    _, found = ask(reader, {key_of(1): (1,)}, [key_of(1)])
    assert found == set() and len(caplog.records) == 1
    reader.stop(PATIENCE)


def test_a_reading_waits_until_the_shelf_is_open(segment_store: SegmentStore) -> None:
    reader = RecordReader(segment_store)
    opened(segment_store.path).write("model", RECORDS)
    threading.Timer(0.1, segment_store.open).start()
    _, found = ask(reader, {RECORDS[0].key: RECORDS[0].tokens}, [RECORDS[0].key])
    assert found == {RECORDS[0].key}
    reader.stop(PATIENCE)


def test_a_writer_that_may_not_be_modest_writes(segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sandbox forbids it."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.setpriority", refuse, raising=False)
    writer = RecordWriter(segment_store, "model", lambda: None)
    assert writer.enqueue(RECORDS) and writer.flush(PATIENCE) and writer.stored_records == 6
    writer.stop(PATIENCE)


def test_a_disk_that_is_slow_gives_what_it_has_in_time_and_is_left_alone_for_a_while(
    segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A record takes 0.1 s, by a clock that stands still otherwise."""
    segment_store.open()
    segment_store.write("model", RECORDS)
    clock, read = (
        SimpleNamespace(now=0.0, monotonic=lambda: clock.now, perf_counter=lambda: clock.now),
        segment_store.read,
    )

    def slowly(*args: Any) -> Any:
        clock.now += 0.1
        return read(*args)

    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(segment_store, "read", slowly)
    reader = RecordReader(segment_store)
    assert not reader.is_paused
    _, found = ask(reader, {r.key: r.tokens for r in RECORDS}, [r.key for r in RECORDS], 0.15)
    assert len(found) == 2 and reader.is_paused and len(caplog.records) == 1 and "slow" in caplog.text
    reader.stop(PATIENCE)


def test_a_store_that_is_still_opened_keeps_nobody_waiting_and_is_not_slow(
    segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash its index is made anew from all segments. One request waits for it, and no other."""
    opens, goes_on = segment_store.open, threading.Event()
    monkeypatch.setattr(segment_store, "open", lambda: (goes_on.wait(PATIENCE), opens()))
    store = KVStore(segment_store, "model")
    reader = store.reader
    tokens = {r.key: r.tokens for r in RECORDS}
    assert store.may_have(RECORDS[0].key)
    assert ask(reader, tokens, list(tokens), 0.05)[1] == set() and not reader.is_paused
    assert not store.may_have(RECORDS[0].key)
    goes_on.set()
    segment_store.wait_until_open()
    segment_store.write("model", RECORDS)
    assert store.may_have(RECORDS[0].key)
    assert len(ask(reader, tokens, list(tokens), PATIENCE)[1]) == len(RECORDS)
    store.close()


def test_a_request_that_came_before_the_store_was_open_says_nothing_of_the_disk(
    segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Opening took its time, so it is late just after that."""
    opens, goes_on, reads = segment_store.open, threading.Event(), threading.Event()
    monkeypatch.setattr(segment_store, "open", lambda: (goes_on.wait(PATIENCE), opens()))
    store = KVStore(segment_store, "model")
    told = queue.SimpleQueue[int]()
    choose = lambda there, rate: (reads.wait(PATIENCE), list(there))[1]  # noqa: E731
    store.reader.submit(ReadRequest({b"k" * 16: (1,)}, choose, lambda found: told.put(len(found)), 0.05))
    goes_on.set()
    assert told.get(timeout=PATIENCE) == 0 and segment_store.is_open and not store.reader.is_paused
    reads.set()
    assert not caplog.records and not store.reader.is_opening_late
    store.close()


def test_a_disk_that_stands_still_keeps_nobody_waiting(
    segment_store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither prompts, nor whoever closes the store; and who comes when it is closed is not told twice."""
    segment_store.open()
    segment_store.write("model", RECORDS)
    goes_on = threading.Event()
    monkeypatch.setattr(threads, "_PAUSE", PATIENCE)
    monkeypatch.setattr(segment_store, "read", lambda *_: (goes_on.wait(PATIENCE), None)[1])
    store, told = KVStore(segment_store, "model"), queue.SimpleQueue[int]()
    tokens = {RECORDS[0].key: RECORDS[0].tokens}
    for _ in range(2):
        store.reader.submit(
            ReadRequest(tokens, lambda there, rate: list(there), lambda found: told.put(len(found)), 0.05)
        )
    assert [told.get(timeout=PATIENCE) for _ in range(2)] == [0, 0] and not store.may_have(RECORDS[0].key)
    store.close(0.1)
    assert store.reader._thread.is_alive(), "closing does not wait for it"
    goes_on.set()
    store.reader._thread.join(PATIENCE)
    assert told.empty()
