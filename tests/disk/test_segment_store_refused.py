"""A segment store that the system refuses something: it misses, keeps its limit, leaves no file open, goes on."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cortexmlx.disk.index import INDEX_NAME, SegmentIndex
from cortexmlx.disk.segment_store import BloomFilter, SegmentStore
from support.store.records import opened, read_all, record

RECORDS = [record(n) for n in range(6)]


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


def test_an_index_of_other_columns_is_made_again(tmp_path: Path) -> None:
    segment_store = opened(tmp_path)
    segment_store.write("model", RECORDS)
    segment_store.close()
    with sqlite3.connect(tmp_path / INDEX_NAME) as file:
        file.execute("ALTER TABLE records DROP COLUMN layout")
        file.execute("ALTER TABLE records ADD COLUMN shapes")
    segment_store = opened(tmp_path)
    segment_store.write("model", [record(7)])
    assert len(read_all(segment_store, [*RECORDS, record(7)])) == 7


def test_an_index_of_which_sqlite_says_no_text_is_made_again(tmp_path: Path) -> None:
    """Its message cites the damaged word, which Python cannot decode: that is no sqlite3.Error."""
    segment_store = opened(tmp_path)
    segment_store.write("model", RECORDS)
    segment_store.close()
    (tmp_path / INDEX_NAME).write_bytes(
        (tmp_path / INDEX_NAME).read_bytes().replace(b"CREATE TABLE", b"CREATE T\xc1BLE")
    )
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
