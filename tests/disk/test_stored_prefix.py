"""Stored prefixes: files that carry pieces to another folder, and what happens when they are damaged or cut short."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.disk import stored_prefix
from cortexmlx.disk.segment_store import SegmentStore
from cortexmlx.disk.segments import Record, write_records
from cortexmlx.disk.stored_prefix import StoredPrefix, export_prefix, find_prefix, import_prefix, list_prefixes
from cortexmlx.disk.tier import model_identity
from cortexmlx.errors import InvalidRequest, PrefixRefused
from support.store.records import opened

PREFIX = StoredPrefix(
    "rules", "a model", "ab" * 32, {"versions": "1"}, 8, tuple(range(100, 148)), (0, 4), True, client="one"
)
"""Six blocks in a group that sees all and in one that sees the last two, and a state at the end."""


def fill(store: SegmentStore, prefix: StoredPrefix = PREFIX) -> dict[bytes, Record]:
    """Store all pieces of a prefix, each with an array of its own, and a name."""
    random = np.random.default_rng(0)
    records = {
        key: Record(key, tokens, (random.standard_normal((2, 3, 4)).astype(np.float32),))
        for key, tokens in prefix.pieces_in(store).items()
    }
    store.write("a model", list(records.values()))
    stored_prefix.save_prefix(store.path, prefix)
    return records


def arrays_of(store: SegmentStore, prefix: StoredPrefix) -> list[bytes]:
    """The bytes of all pieces in order, as a reader of the store gets them."""
    pieces = prefix.pieces_in(store)
    found = store.find(list(pieces))
    records = [store.read(found[key], tokens) for key, tokens in pieces.items()]
    return [array.tobytes() for record in records if record is not None for array in record.arrays]


def test_needed_pieces_are_those_that_the_next_token_sees() -> None:
    assert len(PREFIX.pieces(b"x", None)) == 6 + 2 + 1
    assert len(replace(PREFIX, states=False, first_blocks=(0,)).pieces(b"x", None)) == 6
    assert not PREFIX.pieces(b"x", None).keys() & PREFIX.pieces(b"x", "one").keys()
    assert not PREFIX.pieces(b"x", None).keys() & replace(PREFIX, adapter="cd").pieces(b"x", None).keys()


def test_a_file_brings_the_same_arrays_into_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_prefix, "SEGMENT_BYTES", 200)
    file = tmp_path / "rules.kv"
    first, second = opened(tmp_path / "one"), opened(tmp_path / "two")
    fill(first)
    assert export_prefix(first, find_prefix(first.path, "rules"), file) == file.stat().st_size
    assert file.stat().st_mode & 0o077 == 0 and b'"one"' not in file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        assert len(archive.namelist()) > 3 and archive.testzip() is None
    for name, client in ((None, None), ("mine", "two")):
        prefix = import_prefix(second, file, name, client)
        assert (prefix.name, prefix.client) == (name or "rules", client)
        assert arrays_of(second, prefix) == arrays_of(first, PREFIX) != []
        assert find_prefix(second.path, prefix.name) == prefix
    assert [each.name for each in list_prefixes(second.path)] == ["mine", "rules"]
    assert not store_keys(first) & store_keys(second)
    with pytest.raises(PrefixRefused, match="has no prefix 'other': it has 'mine', 'rules'"):
        find_prefix(second.path, "other")


def store_keys(store: SegmentStore) -> set[bytes]:
    return set(PREFIX.pieces(model_identity(PREFIX.fingerprint, store.secret), None))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[bytes]]:
    folder = tmp_path_factory.mktemp("exported")
    store = opened(folder / "kv")
    fill(store)
    export_prefix(store, PREFIX, folder / "file")
    return (folder / "file").read_bytes(), arrays_of(store, PREFIX)


@given(st.data())
def test_a_damaged_file_is_refused_or_right(
    exported: tuple[bytes, list[bytes]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole, arrays = exported
    damaged, place = bytearray(whole), data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        del damaged[place:]
    else:
        damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "file").write_bytes(damaged)
    store = opened(folder / "kv")
    try:
        assert arrays_of(store, import_prefix(store, folder / "file")) == arrays
    except PrefixRefused as error:
        assert "file" in str(error) or "manifest" in str(error)
        assert list_prefixes(store.path) == store.segments() == []
    finally:
        store.close()


def test_other_bytes_under_a_right_checksum_are_found_by_their_proof(
    exported: tuple[bytes, list[bytes]], tmp_path: Path
) -> None:
    (tmp_path / "whole").write_bytes(exported[0])
    with zipfile.ZipFile(tmp_path / "whole") as whole, zipfile.ZipFile(tmp_path / "file", "w") as changed:
        for name in whole.namelist():
            data = bytearray(whole.read(name))
            data[-1] ^= name != "prefix.json"
            changed.writestr(name, bytes(data))
    store = opened(tmp_path / "kv")
    with pytest.raises(PrefixRefused, match="is damaged: a segment is not what was written"):
        import_prefix(store, tmp_path / "file")
    longer = stored_prefix._to_json(replace(PREFIX, tokens=tuple(range(100, 156)), client=None))
    with zipfile.ZipFile(tmp_path / "whole") as whole, zipfile.ZipFile(tmp_path / "file", "w") as cut:
        for name in whole.namelist():
            cut.writestr(name, longer if name == "prefix.json" else whole.read(name))
    with pytest.raises(PrefixRefused, match="it lacks 3 of 11 pieces"):
        import_prefix(store, tmp_path / "file")
    assert store.segments() == [], "the right pieces before it are not kept either"


def test_a_hostile_file_is_refused_before_it_takes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, file, huge = opened(tmp_path / "kv"), tmp_path / "file", io.BytesIO()
    monkeypatch.setattr(stored_prefix, "_MAX_SEGMENT", 1000)
    write_records(huge, "", b"", "a model", [Record(b"k" * 16, tuple(range(9)), ())])
    for change, segment, words in (
        ({"format": "cortexmlx-prefix-2"}, b"", "another version"),
        ({"parts": 3}, b"", "is damaged"),
        ({"tokens": []}, b"", "no whole blocks"),
        ({"tokens": [1] * 47}, b"", "no whole blocks"),
        ({"block_size": 8.5}, b"", "no numbers"),
        ({"tokens": [1 << 31] * 8}, b"", "no numbers"),
        ({"tokens": [1] * 2000, "block_size": 1, "first_blocks": [0] * 2000}, b"", "fewer bytes than pieces"),
        ({}, b"x" * 1001, "has 1,001 bytes"),
        ({}, huge.getvalue(), "more or fewer tokens than a block"),
    ):
        manifest = json.loads(stored_prefix._to_json(PREFIX)) | change
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("prefix.json", json.dumps(manifest))
            archive.writestr("00001.safetensors", segment)
        with pytest.raises(PrefixRefused, match=words):
            import_prefix(store, file)
    assert list_prefixes(store.path) == []


def test_an_import_does_not_make_room_by_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_prefix, "SEGMENT_BYTES", 200)
    first, file = opened(tmp_path / "one"), tmp_path / "file"
    fill(first)
    second = SegmentStore(tmp_path / "two", export_prefix(first, PREFIX, file))
    second.open()
    pieces = list(import_prefix(second, file).pieces_in(second))
    second._remove_segments([segment.name for segment in second.segments()[2:]])
    left = len(second.find(pieces))
    for number in range(8):
        second.write("other", [Record(bytes([number] * 16), (1,), (np.zeros(20, np.float32),))])
    assert 0 < left == len(second.find(pieces)) < len(pieces)
    import_prefix(second, file)
    assert len(second.find(pieces)) == len(pieces)


def test_what_is_no_such_file_is_refused_in_words(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    for content in (b"", b"text", b"PK\x05\x06" + b"\0" * 18):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(PrefixRefused, match="is no file of `cortexmlx cache export`"):
            import_prefix(store, tmp_path / "file")
    export_prefix(store, fill(store) and PREFIX, tmp_path / "file")
    os.truncate(tmp_path / "file", 3000)
    with pytest.raises(PrefixRefused, match="file is damaged: File is not a zip file"):
        import_prefix(store, tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("prefix.json", b"{}" + b" " * 1000)
    with pytest.raises(PrefixRefused, match="compressed"):
        import_prefix(store, tmp_path / "file")
    with pytest.raises(InvalidRequest, match="name is empty"):
        import_prefix(store, tmp_path / "file", "")
    with pytest.raises(PrefixRefused, match="there is no file"):
        import_prefix(store, tmp_path / "none")


def test_pieces_that_are_gone_and_files_that_are_too_large_are_refused_with_the_numbers(tmp_path: Path) -> None:
    store = opened(tmp_path / "one")
    fill(store)
    export_prefix(store, PREFIX, tmp_path / "file")
    small = SegmentStore(tmp_path / "two", 1000)
    small.open()
    with pytest.raises(PrefixRefused, match=r"and the store may have 1000 B: raise kv_store_bytes"):
        import_prefix(small, tmp_path / "file")
    store.clear()
    with pytest.raises(PrefixRefused, match=r"9 of 9 pieces of 'rules' .* Compute it again"):
        export_prefix(store, PREFIX, tmp_path / "file2")
    assert not (tmp_path / "file2").exists()


KILL = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from cortexmlx.disk import stored_prefix
from cortexmlx.disk.segment_store import SegmentStore
from support.store.records import opened
from disk.test_stored_prefix import PREFIX
stored_prefix.SEGMENT_BYTES = 200
calls = []
def second(call):
    def counted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return counted
folder, what = Path(sys.argv[1]), sys.argv[2]
if what == "export":
    stored_prefix.write_records = second(stored_prefix.write_records)
    stored_prefix.export_prefix(opened(folder / "one"), PREFIX, folder / "file")
else:
    SegmentStore.write = second(SegmentStore.write)
    stored_prefix.import_prefix(opened(folder / "two"), folder / "file")
"""


def test_a_kill_in_the_middle_leaves_the_old_file_and_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_prefix, "SEGMENT_BYTES", 200)
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    first = opened(tmp_path / "one")
    fill(first)
    (tmp_path / "file").write_bytes(b"old")
    for what in ("export", "import"):
        command = [sys.executable, "-c", KILL, str(tmp_path), what]
        assert subprocess.run(command, cwd=root, env=environment).returncode == -signal.SIGKILL
        if what == "export":
            assert (tmp_path / "file").read_bytes() == b"old"
            export_prefix(first, PREFIX, tmp_path / "file")
    second = opened(tmp_path / "two")
    assert list_prefixes(second.path) == [] and second.segments()
    assert arrays_of(second, import_prefix(second, tmp_path / "file")) == arrays_of(first, PREFIX)
