"""A segment store: reads what was written, drops the oldest for the newest, and takes every fault as a miss."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from cortexmlx.disk.index import INDEX_NAME, SegmentIndex
from cortexmlx.disk.segment_store import SegmentStore
from support.store.records import opened, read_all, record, same

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
    with pytest.raises(OSError, match="are left to others"):
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
