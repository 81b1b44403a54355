"""The hash of files: of their bytes, and never an old one for new bytes."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortexmlx.disk import hashes as file_hash
from cortexmlx.disk import hashes as piece_hash
from cortexmlx.disk.folder import HASHES
from cortexmlx.disk.hashes import FileHash, HashCache, stamp_of
from support.patience import soon

SECRET = b"s" * 32


@pytest.fixture
def kept(tmp_path: Path) -> HashCache:
    return HashCache(tmp_path, SECRET)


def digest(*paths: Path, kept: HashCache | None = None) -> bytes:
    found = FileHash(paths, lambda: kept).digest()
    assert found is not None
    return found


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_bytes_and_order_count_and_names_do_not(tmp_path: Path) -> None:
    one, other, same = (written(tmp_path / n, d) for n, d in (("a", b"one"), ("b", b"two"), ("c", b"one")))
    assert digest(one) == digest(same) != digest(other)
    different = [digest(), digest(one), digest(one, other), digest(other, one), digest(one, one)]
    assert len(set(different)) == len(different)


def test_who_does_not_wait_gets_the_same(tmp_path: Path, kept: HashCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_hash, "PIECE", 1000)
    path = written(tmp_path / "a", os.urandom(5000))
    told: list[bytes | None] = []
    for _ in range(2):  # hashed, and kept
        FileHash([path], lambda: kept).when_ready(told.append)
        assert soon(lambda: told)
    FileHash([tmp_path / "none"]).when_ready(told.append)
    assert soon(lambda: len(told) == 3) and told == [digest(path), digest(path), None]


def test_a_file_is_read_once_as_long_as_it_stays(
    tmp_path: Path, kept: HashCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a", os.urandom(5000))
    first = digest(path, kept=kept)
    with monkeypatch.context() as patched:
        patched.setattr(file_hash._FileSource, "hash_range", None)
        assert digest(path, kept=kept) == first, "it was not read"
    (tmp_path / HASHES).unlink()
    assert digest(path, kept=kept) == first == digest(path)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_a_file_its_old_hash_is_not_found(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Written in place with its size and its times kept, replaced by another, mended and written again."""
    folder = tmp_path_factory.mktemp("files")
    kept = HashCache(folder, SECRET)
    path = written(folder / "weights", b"0" * 64)
    for number in range(1, 4):
        content = b"%064d" % data.draw(st.integers(0, 3))
        before = path.stat()
        way = data.draw(st.sampled_from(["in place", "a link to another", "renamed", "removed first", "copied over"]))
        if way == "in place":
            with path.open("r+b") as file:
                file.write(content)
        elif way == "removed first":
            path.unlink()
            path.write_bytes(content)
        else:
            other = written(folder / str(number), content)
            if way == "renamed":
                other.replace(path)
            elif way == "copied over":
                shutil.copyfile(other, path)
            else:
                path.unlink()
                path.symlink_to(other)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert digest(path, kept=kept) == digest(written(folder / "judge", content))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells of such a change")
def test_a_file_that_is_written_again_through_a_mapping_is_read_again(tmp_path: Path, kept: HashCache) -> None:
    """Writing to a page that is dirty already changes no time of the file."""
    path = written(tmp_path / "a", os.urandom(5000))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0] ^= 1
        os.fsync(file.fileno())
        before = stamp_of(path)
        time.sleep(0.05)  # longer than a tick
        mapped[0] ^= 1
        if stamp_of(path) == before:
            pytest.skip("this file system, such as tmpfs, never tells of a change through a mapping")
        first = digest(path, kept=kept)
        mapped[0] ^= 1
        assert digest(path, kept=kept) == digest(path) != first


def test_a_file_that_changes_meanwhile_has_no_hash(tmp_path: Path, kept: HashCache) -> None:
    path = written(tmp_path / "a", b"before")
    begun = FileHash([path], lambda: kept)
    written(path, b"behind")
    assert begun.digest() is None
    assert not (tmp_path / HASHES).exists()
    begun = FileHash([path], lambda: kept)
    path.unlink()
    assert begun.digest() is None
    assert FileHash([path]).digest() is None
    os.mkfifo(path)
    assert FileHash([path]).digest() is None
    assert FileHash([tmp_path]).digest() is None


@pytest.mark.parametrize("age", [-3600, 0])
def test_times_that_tell_nothing_are_not_believed(
    tmp_path: Path, kept: HashCache, monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    """A clock that was set back, and a file system that counts in whole seconds."""
    path = written(tmp_path / "a", b"weights")
    stamp = stamp_of(path)
    whole = time.time_ns() // 10**9 * 10**9 - 10**10
    told = replace(stamp, changed_ns=whole if age == 0 else stamp.changed_ns - int(age * 1e9))
    monkeypatch.setattr(file_hash, "_stamp_of_open_file", lambda path, descriptor: told)
    assert FileHash([path], lambda: kept).digest() is None
    assert not (tmp_path / HASHES).exists()
