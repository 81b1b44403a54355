"""A segment store among other versions, and with more segments than anybody waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.disk import segment_store as module
from cortexmlx.disk.index import INDEX_NAME, SegmentIndex
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.segments import FORMAT
from cortexmlx.disk.store import KVStore
from support.store.records import key_of, opened, read_all, record

RECORDS = [record(n) for n in range(6)]


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
