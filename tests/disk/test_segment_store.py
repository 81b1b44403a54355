"""A segment store: reads what was written, drops the oldest for the newest, and takes every fault as a miss."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cortexmlx.disk import segment_store as module
from cortexmlx.disk.index import INDEX_NAME, SegmentIndex
from cortexmlx.disk.segment_store import BloomFilter, SegmentStore
from cortexmlx.disk.segments import FORMAT
from cortexmlx.disk.store import KVStore
from support.store.records import key_of, opened, read_all, record, same

RECORDS = [record(n) for n in range(6)]


def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    assert opened(tmp_path).write("model", RECORDS) == 6
    again = opened(tmp_path)
    assert all(same(read_all(again, RECORDS)[r.key], r) for r in RECORDS)
    assert again.write("model", [*RECORDS, record(9)]) == 1, "what is there is not written again"
    assert len(read_all(again, [record(9)])) == 1


def test_it_says_what_it_may_have_and_learns_what_others_wrote(tmp_path: Path) -> None:
    segment_store, other = SegmentStore(tmp_path, 1 << 30), opened(tmp_path)
    assert segment_store.may_have(RECORDS[0].key), "it has not looked yet"
    segment_store.open()
    assert not segment_store.may_have(RECORDS[0].key)
    segment_store.write("model", RECORDS[:1])
    other.write("model", RECORDS[1:])
    assert segment_store.may_have(RECORDS[0].key) and not segment_store.may_have(RECORDS[1].key)
    segment_store.refresh()
    assert all(segment_store.may_have(record.key) for record in RECORDS)
    assert all(opened(tmp_path).may_have(record.key) for record in RECORDS)


def test_a_lost_index_is_made_again_from_the_segments(tmp_path: Path) -> None:
    opened(tmp_path).write("model", RECORDS[:3])
    opened(tmp_path).write("model", RECORDS[3:])
    (tmp_path / INDEX_NAME).unlink()
    assert len(read_all(opened(tmp_path), RECORDS)) == 6


def test_an_index_that_is_lost_at_work_is_made_again_with_the_next_write(tmp_path: Path) -> None:
    segment_store = opened(tmp_path)
    segment_store.write("model", RECORDS[:3])
    (tmp_path / INDEX_NAME).unlink()
    segment_store.write("model", RECORDS[3:])
    assert len(read_all(segment_store, RECORDS)) == 6 == len(read_all(opened(tmp_path), RECORDS))


def test_an_index_that_another_process_made_again_is_everybodys(tmp_path: Path) -> None:
    """Who goes on with the old one, which has no name any more, would store for himself alone."""
    one, other = opened(tmp_path), opened(tmp_path)
    one.write("model", [record(1)])
    (tmp_path / INDEX_NAME).unlink()
    other.write("model", [record(2)])
    one.write("model", [record(3)])
    for segment_store in (one, other):
        assert len(read_all(segment_store, [record(n) for n in (1, 2, 3)])) == 3


def test_segments_that_were_not_used_for_the_longest_time_go_first(tmp_path: Path) -> None:
    segment_store = opened(tmp_path)
    for each in RECORDS[:3]:
        segment_store.write("model", [each])
    segment_store.limit = sum(line.bytes for line in segment_store.segments())
    segment_store.mark_used([segment_store.find([RECORDS[0].key])[RECORDS[0].key]])
    segment_store.write("model", [RECORDS[3]])
    assert set(read_all(segment_store, RECORDS)) == {RECORDS[n].key for n in (0, 2, 3)}
    chain = [RECORDS[n].key for n in (3, 0, 2)]
    found = segment_store.find(chain)
    segment_store.mark_used([found[key] for key in chain])
    segment_store.write("model", [RECORDS[4]])
    assert set(read_all(segment_store, RECORDS)) == {RECORDS[n].key for n in (3, 0, 4)}, "a chain's end goes first"
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= segment_store.limit


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment_store = opened(tmp_path)
    for past, each in enumerate(RECORDS[:3]):
        monkeypatch.setattr("time.time", lambda past=past: 1e9 - 1e6 * past)
        segment_store.write("model", [each])
    segment_store.limit = sum(line.bytes for line in segment_store.segments())
    segment_store.write("model", [RECORDS[3]])
    assert set(read_all(segment_store, RECORDS)) == {RECORDS[n].key for n in (1, 2, 3)}


def test_a_record_above_the_limit_is_not_written(tmp_path: Path) -> None:
    segment_store = opened(tmp_path, RECORDS[0].nbytes - 1)
    assert segment_store.write("model", [RECORDS[0]]) == 0 and segment_store.segments() == []


def test_other_tokens_under_the_same_key_are_a_miss(tmp_path: Path) -> None:
    segment_store = opened(tmp_path)
    segment_store.write("model", RECORDS)
    place = segment_store.find([RECORDS[0].key])[RECORDS[0].key]
    assert segment_store.read(place, (9,) * 8) is None
    assert segment_store.find([RECORDS[0].key]) == {}


def test_a_store_of_somebody_else_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Segments and index of another folder, copied here as they are."""
    opened(tmp_path / "theirs").write("model", RECORDS)
    opened(tmp_path / "ours").close()
    for path in (tmp_path / "theirs").iterdir():
        if path.name != "secret":
            shutil.copy(path, tmp_path / "ours" / path.name)
    with caplog.at_level(logging.WARNING):
        assert read_all(opened(tmp_path / "ours"), RECORDS) == {}
    assert len(caplog.records) == 1


def test_a_segment_that_another_process_removed_is_a_miss_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment_store, other = opened(tmp_path), opened(tmp_path)
    segment_store.write("model", RECORDS)
    place = segment_store.find([RECORDS[0].key])[RECORDS[0].key]
    assert other.clear() > 0
    assert segment_store.read(place, RECORDS[0].tokens) is None and not caplog.records
    assert segment_store.write("model", RECORDS) == 6, "and may be written again"


@pytest.mark.parametrize("change", ["remove_records", "add_segment"])
def test_what_another_process_changes_at_once_is_no_damage(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes again what was forgotten, or removes what was added, before anybody looks."""
    one, other = opened(tmp_path), opened(tmp_path)
    one.write("model", RECORDS[:1])
    plain = getattr(SegmentIndex, change)

    def meet(index: SegmentIndex, *args: object, **options: object) -> None:
        plain(index, *args, **options)
        monkeypatch.undo()
        if change == "remove_records":
            other.write("model", RECORDS[:1])
        else:
            other.clear()

    monkeypatch.setattr(SegmentIndex, change, meet)
    if change == "remove_records":
        assert one.read(one.find([RECORDS[0].key])[RECORDS[0].key], [99]) is None
    else:
        one.write("model", RECORDS[1:2])
    assert len(read_all(one, RECORDS)) == (1 if change == "remove_records" else 0)
    assert not caplog.records


def test_a_disk_that_is_almost_full_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment_store = opened(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 29))
    with pytest.raises(OSError, match="MiB free, of which 1 GiB must stay free"):
        segment_store.write("model", RECORDS)
    assert not list(tmp_path.glob("*.safetensors"))


def test_clear_leaves_what_is_not_the_stores(tmp_path: Path) -> None:
    segment_store = opened(tmp_path)
    segment_store.write("model", RECORDS)
    (tmp_path / "notes.safetensors").write_text("mine")
    segment_store.clear()
    assert sorted(os.listdir(tmp_path)) == sorted([INDEX_NAME, "notes.safetensors", "secret"])


def test_a_folder_that_is_taken_away_is_misses_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment_store = SegmentStore(tmp_path / "store", 1 << 30)
    segment_store.open()
    segment_store.write("model", RECORDS)
    shutil.rmtree(tmp_path / "store")
    assert read_all(segment_store, RECORDS) == {}
    with pytest.raises(OSError):
        segment_store.write("model", RECORDS)
    segment_store.write("model", RECORDS) if (tmp_path / "store").exists() else None
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) <= 1


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_what_cannot_be_read_just_now_is_a_miss_and_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    segment_store = opened(tmp_path)
    segment_store.write("a model", [record(1)])
    with monkeypatch.context() as patched:
        patched.setattr("cortexmlx.disk.segment_store.open_regular_file", refuse)
        assert read_all(segment_store, [record(1)]) == {}
    assert len(read_all(segment_store, [record(1)])) == 1


# -- A segment store that the system refuses something: it misses, keeps its limit, leaves no file open, goes on ------


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ESTALE, "Stale file handle")


def test_without_an_index_nothing_is_written(tmp_path: Path) -> None:
    """Nobody could say which segments go, or that a record is there."""
    opened(tmp_path).close()
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / INDEX_NAME).mkdir()
    segment_store = opened(tmp_path)
    for _ in range(3):
        with pytest.raises(OSError, match="no index"):
            segment_store.write("model", RECORDS)
    assert not stored_bytes(tmp_path)


@pytest.mark.parametrize("since", ["before", "segment"])
def test_while_another_process_holds_the_index_nothing_is_left_behind(
    tmp_path: Path, since: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortexmlx.disk.index._BUSY_SECONDS", 0.0)
    segment_store = opened(tmp_path)
    segment_store.write("model", RECORDS[:1])
    before = stored_bytes(tmp_path)
    other = sqlite3.connect(tmp_path / INDEX_NAME, isolation_level=None)
    if since == "before":
        other.execute("BEGIN EXCLUSIVE")
    else:
        plain = SegmentIndex.add_segment

        def late(*args: Any) -> None:
            other.execute("BEGIN EXCLUSIVE")
            plain(*args)

        monkeypatch.setattr(SegmentIndex, "add_segment", late)
    with pytest.raises(OSError, match="locked"):
        segment_store.write("model", RECORDS[1:])
    assert stored_bytes(tmp_path) == before
    other.execute("ROLLBACK")
    monkeypatch.undo()
    assert segment_store.write("model", RECORDS) == 5, "it goes on where it was"


@pytest.mark.parametrize("damage", ["other columns", "a word that is no text"])
def test_an_index_that_cannot_be_used_is_made_again(tmp_path: Path, damage: str) -> None:
    """SQLite's message cites the damaged word, which Python cannot decode: that is no sqlite3.Error."""
    segment_store, file = opened(tmp_path), tmp_path / INDEX_NAME
    segment_store.write("model", RECORDS)
    segment_store.close()
    if damage == "other columns":
        with sqlite3.connect(file) as index:
            index.execute("ALTER TABLE records DROP COLUMN layout")
            index.execute("ALTER TABLE records ADD COLUMN shapes")
    else:
        file.write_bytes(file.read_bytes().replace(b"CREATE TABLE", b"CREATE T\xc1BLE"))
    segment_store = opened(tmp_path)
    segment_store.write("model", [record(7)])
    assert len(read_all(segment_store, [*RECORDS, record(7)])) == 7


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).write("model", RECORDS)
    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", refuse)
        segment_store = opened(tmp_path)
    segment_store.write("model", [record(7)])
    assert len(read_all(segment_store, RECORDS)) == 6


def open_below(folder: Path) -> int:
    """How many files of a folder this process has open. Others may come and go meanwhile."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).startswith(str(folder)) for link in links)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not say which files are open")
def test_a_file_that_cannot_be_looked_at_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment_store = opened(tmp_path)
    segment_store.write("model", RECORDS)
    held = open_below(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("os.fstat", refuse)
        assert read_all(segment_store, RECORDS) == {}
        for opens in (SegmentIndex, lambda folder: SegmentStore(folder, 1 << 30)):
            with pytest.raises(OSError, match="Stale"):
                opens(tmp_path)
    assert open_below(tmp_path) == held
    assert len(read_all(segment_store, RECORDS)) == 6


def test_a_key_is_asked_for_while_the_index_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread asks, and the writer's takes away what is known meanwhile."""
    looked = [BloomFilter(), None]
    monkeypatch.setattr(
        SegmentStore,
        "_key_filter",
        property(lambda segment_store: looked.pop(0), lambda segment_store, known: None),
        raising=False,
    )
    assert not SegmentStore(tmp_path, 1 << 30).may_have(record(1).key)


# -- A segment store among other versions, and with more segments than anybody waits for ------------------------------


def make_foreign(path: Path) -> bytes:
    """The segment, as if a later version had written it."""
    data = path.read_bytes().replace(FORMAT.encode(), FORMAT[:-1].encode() + b"9")
    path.write_bytes(data)
    return data


def test_segments_of_another_version_are_left_alone_and_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path).write("model", RECORDS[:3])
    (theirs,) = tmp_path.glob("*.safetensors")
    data = make_foreign(theirs)
    (tmp_path / INDEX_NAME).unlink()
    segment_store = opened(tmp_path, 3 * RECORDS[0].nbytes)
    for start in (0, 3, 0):
        assert segment_store.write("model", RECORDS[start : start + 3]) == 3, "they take nobody's room"
    assert theirs.read_bytes() == data and segment_store.foreign_bytes() == len(data) and not caplog.records
    assert len(read_all(segment_store, RECORDS)) == 3
    assert segment_store.clear() > len(data) and not theirs.exists() and segment_store.foreign_bytes() == 0


@pytest.mark.parametrize(
    ("data", "stays"),
    [
        (b"", False),
        (b"\0" * 4000, False),
        (b"\x10" + b"\0" * 7 + b"no header at all", False),
        (b"\xff" * 8 + b"{}", False),
        (b"\x02" + b"\0" * 7 + b"{}", True),
        (b"\x1f" + b"\0" * 7 + b'{"__metadata__":{"format":"x"}} ', True),
        (b"\x2c" + b"\0" * 7 + b'{"__metadata__":{"format":"cortexmlx-kv-1"}}', False),
    ],
)
def test_what_no_version_can_read_goes_and_what_one_might_stays(tmp_path: Path, data: bytes, stays: bool) -> None:
    opened(tmp_path).close()
    path = tmp_path / f"{'a' * 32}.safetensors"
    path.write_bytes(data)
    (tmp_path / INDEX_NAME).unlink()
    segment_store = opened(tmp_path)
    assert path.exists() == stays and segment_store.foreign_bytes() == (len(data) if stays else 0)


def test_an_index_is_made_again_with_few_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each change SQLite writes its file anew, so one change for each segment takes seconds."""
    segment_store = opened(tmp_path)
    for one in RECORDS:
        segment_store.write("model", [one])
    (tmp_path / INDEX_NAME).unlink()
    changes, change = [], SegmentIndex._transaction
    monkeypatch.setattr(module, "_SEGMENTS_PER_CHANGE", 4)
    monkeypatch.setattr(SegmentIndex, "_transaction", lambda index: changes.append(index) or change(index))
    again = SegmentStore(tmp_path, 1 << 30)
    asked = []
    read = module.read_header
    monkeypatch.setattr(module, "read_header", lambda *args: asked.append(again.may_have(key_of(0))) or read(*args))
    again.open()
    assert len(changes) <= 3 and len(read_all(again, RECORDS)) == 6
    assert asked == [False] * 6, "nobody waits for what is not known yet"
    assert again.may_have(key_of(0))


def test_closing_leaves_the_rest_of_an_index_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment_store = opened(tmp_path)
    for one in RECORDS:
        segment_store.write("model", [one])
    (tmp_path / INDEX_NAME).unlink()
    monkeypatch.setattr(module, "_SEGMENTS_PER_CHANGE", 1)
    began, read, headers = SegmentStore(tmp_path, 1 << 30), module.read_header, []

    def read_and_close(folder: Path, name: str) -> object:
        headers.append(name)
        if len(headers) == 2:
            store.close()
        return read(folder, name)

    monkeypatch.setattr(module, "read_header", read_and_close)
    with monkeypatch.context() as threads:
        threads.setattr("threading.Thread.start", lambda thread: None)
        threads.setattr("threading.Thread.join", lambda thread, seconds=None: None)
        store = KVStore(began, "model")
        began.open()
    assert len(headers) == 2
    assert len(read_all(opened(tmp_path), RECORDS)) == 6
