"""Kept hashes: what was added is found, whatever is done to the file, and nothing else."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortexmlx.disk import hashes as kept_hashes
from cortexmlx.disk.folder import HASHES, open_folder
from cortexmlx.disk.hashes import HashCache

SECRET = b"s" * 32
HASH = {b"%d" % n: bytes([n]) * 32 for n in range(8)}


def test_what_was_added_is_found_by_who_knows_the_secret(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        HashCache(tmp_path, SECRET).add(HASH)
    finally:
        os.umask(before)
    assert HashCache(tmp_path, SECRET).find([*HASH, b"another"]) == HASH
    assert HashCache(tmp_path, b"t" * 32).find(HASH) == {}
    assert (tmp_path / HASHES).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [HASHES]


def test_no_line_stands_for_another(tmp_path: Path) -> None:
    """Names and hashes of two lines are exchanged."""
    HashCache(tmp_path, SECRET).add(HASH)
    lines = [line.split() for line in (tmp_path / HASHES).read_bytes().splitlines()]
    mixed = [[lines[i][0], lines[i - 1][1], lines[j][2]] for i in range(8) for j in (i, i - 1)]
    (tmp_path / HASHES).write_bytes(b"".join(b" ".join(line) + b"\n" for line in mixed))
    assert HashCache(tmp_path, SECRET).find(HASH) == {}


def test_damage_loses_lines_and_never_changes_one(tmp_path: Path) -> None:
    chance, kept = random.Random(1), HashCache(tmp_path, SECRET)
    kept.add(HASH)
    whole = (tmp_path / HASHES).read_bytes()
    for _ in range(200):
        text = bytearray(whole)
        for _ in range(chance.choice((1, 2, 30))):
            text[chance.randrange(len(text))] = chance.choice((chance.randrange(256), 10, 32))
        (tmp_path / HASHES).write_bytes(text[: chance.choice((len(text), chance.randrange(len(text))))])
        assert kept.find(HASH).items() <= HASH.items()
    for text in (b"", b"\0" * 9999, b"\n" * 999_999):
        (tmp_path / HASHES).write_bytes(text)
        assert kept.find(HASH) == {}
    kept.add(HASH)
    assert kept.find(HASH) == HASH


def test_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_hashes, "_MAX_LINES", 4)
    kept = HashCache(tmp_path, SECRET)
    for stamp, digest in HASH.items():
        kept.add({stamp: digest})
    kept.add({b"4": HASH[b"4"]})
    kept.add({b"new": b"n" * 32})
    assert set(kept.find([*HASH, b"new"])) == {b"6", b"7", b"4", b"new"}


def test_those_who_add_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: HashCache(tmp_path, SECRET).add(dict([item])), list(HASH.items()) * 4))
    found = HashCache(tmp_path, SECRET).find(HASH)
    assert found and found.items() <= HASH.items()
    assert os.listdir(tmp_path) == [HASHES]


def test_what_is_no_file_is_read_by_nobody_and_links_are_not_followed(tmp_path: Path) -> None:
    kept, theirs = HashCache(tmp_path, SECRET), tmp_path / "theirs"
    os.mkfifo(tmp_path / HASHES)
    assert kept.find(HASH) == {}
    (tmp_path / HASHES).unlink()
    theirs.write_text("another file of the user")
    (tmp_path / HASHES).symlink_to(theirs)
    assert kept.find(HASH) == {}
    kept.add(HASH)
    assert theirs.read_text() == "another file of the user" and kept.find(HASH) == HASH
    (tmp_path / HASHES).unlink()
    (tmp_path / HASHES).mkdir()
    kept.add(HASH)
    assert kept.find(HASH) == {}
    HashCache(tmp_path / "no such folder", SECRET).add(HASH)


def test_a_folder_of_a_store_may_hold_them_alone(tmp_path: Path) -> None:
    HashCache(tmp_path, SECRET).add(HASH)
    assert HashCache(tmp_path, open_folder(tmp_path)).find(HASH) == {}
