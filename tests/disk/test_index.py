"""The index: what it finds, in which order segments go, and two processes that use it at once."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from cortexmlx.disk.index import INDEX_NAME, SegmentIndex, delete_index
from cortexmlx.disk.segments import RecordLocation
from support.store.records import key_of

LAYOUT = (("I32", (8,)), ("F32", (2, 8, 4)))


def place(number: int, segment: str) -> RecordLocation:
    return RecordLocation(key_of(number), segment, 100 + number, 32 + 256, LAYOUT, b"p" * 16)


def segment(letter: str) -> str:
    return f"{letter * 32}.safetensors"


def test_records_are_found_where_they_lie(tmp_path: Path) -> None:
    index = SegmentIndex(tmp_path)
    places = [place(n, segment("a")) for n in range(1200)]
    index.add_segment(segment("a"), "model", 5000, places)
    assert index.find([key_of(n) for n in range(-5, 1200)]) == {p.key: p for p in places}
    assert (tmp_path / INDEX_NAME).stat().st_mode & 0o777 == 0o600


def test_the_segment_that_was_used_last_goes_last(tmp_path: Path) -> None:
    index = SegmentIndex(tmp_path)
    for letter in "abc":
        index.add_segment(segment(letter), "model", 1, [])
    index.mark_used([segment("b"), segment("a")])
    index.add_recovered_segments([(segment("d"), "model", 1, [])])
    assert [line.name[0] for line in index.segments()] == ["d", "c", "b", "a"]


def test_a_record_is_found_where_it_was_written_last(tmp_path: Path) -> None:
    one, other = SegmentIndex(tmp_path), SegmentIndex(tmp_path)
    one.add_segment(segment("a"), "model", 1, [place(1, segment("a"))])
    other.add_segment(segment("b"), "model", 1, [place(1, segment("b")), place(2, segment("b"))])
    one.add_recovered_segments([(segment("c"), "model", 1, [place(2, segment("c")), place(3, segment("c"))])])
    found = one.find([key_of(n) for n in (1, 2, 3)])
    assert [found[key_of(n)].segment[0] for n in (1, 2, 3)] == ["b", "b", "c"]
    other.remove_segments([segment("b")])
    assert list(one.find([key_of(n) for n in (1, 2, 3)])) == [key_of(3)]
    one.remove_records([key_of(3)])
    assert other.find([key_of(3)]) == {} and [line.records for line in other.segments()] == [0, 0]


@pytest.mark.parametrize(
    "row",
    [
        "'../../secret', 1, 288, '[[\"I32\",[8]],[\"F32\",[2,8,4]]]', x'00'",
        "'{0}', 1, 288, '[]', x'00'",
        "'{0}', 1, 287, '[[\"I32\",[8]],[\"F32\",[2,8,4]]]', x'00'",
        "'{0}', -1, 288, '[[\"I32\",[8]],[\"F32\",[2,8,4]]]', x'00'",
        "'{0}', 1, 288, '[[\"I32\",[8]],[\"F32\",[2,8,4]]]', 99999999999",
        "'{0}', 9e999, 288, '[[\"I32\",[8]],[\"F32\",[2,8,4]]]', x'00'",
        "'{0}', 1, 288, '[[\"I32\",[8]],[\"F32\",[2,8,1e999]]]', x'00'",
        "'{0}', 'x', 288, '[[\"I32\",[8]],[\"F32\",[2,8,4]]]', x'00'",
    ],
)
def test_a_damaged_row_is_not_there(tmp_path: Path, row: str) -> None:
    index = SegmentIndex(tmp_path)
    with sqlite3.connect(tmp_path / INDEX_NAME) as file:
        file.execute(f"INSERT INTO records VALUES (?, {row.format(segment('a'))})", (key_of(1),))
    assert index.find([key_of(1)]) == {}


@pytest.mark.parametrize(
    ("name", "size", "says"), [("../escape", "1", "no segment"), (segment("a"), "9e999", "infinity")]
)
def test_what_is_no_segments_is_an_error_of_the_index(tmp_path: Path, name: str, size: str, says: str) -> None:
    index = SegmentIndex(tmp_path)
    with sqlite3.connect(tmp_path / INDEX_NAME) as file:
        file.execute(f"INSERT INTO segments VALUES (?, 'm', {size}, 1)", (name,))
    with pytest.raises(sqlite3.DatabaseError, match=says):
        index.segments()


def test_what_is_no_file_of_this_users_is_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link leads out of the folder, and who owns an index decides which triggers it has."""
    (tmp_path / INDEX_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(sqlite3.DatabaseError, match="a link"):
        SegmentIndex(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
    delete_index(tmp_path)
    os.mkfifo(tmp_path / INDEX_NAME)
    with pytest.raises(sqlite3.DatabaseError, match="no file"):
        SegmentIndex(tmp_path)
    delete_index(tmp_path)
    SegmentIndex(tmp_path).close()
    (tmp_path / f"{INDEX_NAME}-journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(sqlite3.DatabaseError, match="no file"):
        SegmentIndex(tmp_path)
    delete_index(tmp_path)
    SegmentIndex(tmp_path).close()
    monkeypatch.setattr("os.geteuid", lambda: (tmp_path / INDEX_NAME).stat().st_uid + 1)
    with pytest.raises(sqlite3.DatabaseError, match="this user"):
        SegmentIndex(tmp_path)


def test_a_file_that_is_no_index_is_an_error_and_can_be_thrown_away(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_bytes(os.urandom(9000))
    with pytest.raises(sqlite3.DatabaseError):
        SegmentIndex(tmp_path)
    delete_index(tmp_path)
    SegmentIndex(tmp_path).add_segment(segment("a"), "model", 1, [])
