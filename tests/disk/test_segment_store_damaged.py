"""A store under attack: what it gives is what was written, whatever is done to its files."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cortexmlx.disk.index import INDEX_NAME
from cortexmlx.disk.segment_store import SegmentStore
from support.effort import THOROUGH
from support.store.damage import DAMAGES
from support.store.records import opened, read_all, record, same

RECORDS = [record(n) for n in range(12)]
WRITTEN = {r.key: r for r in RECORDS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three segments."""
    folder = tmp_path_factory.mktemp("store")
    segment_store = opened(folder)
    for start in range(0, 12, 4):
        segment_store.write("model", RECORDS[start : start + 4])
    segment_store.close()
    return folder


def check(segment_store: SegmentStore) -> int:
    """Whatever is read is right; returns how much that is."""
    found = read_all(segment_store, RECORDS)
    assert all(same(record, WRITTEN[key]) for key, record in found.items()), "something else than what was written"
    return len(found)


def attack(whole: Path, folder: Path, seed: int, caplog: pytest.LogCaptureFixture) -> int:
    """Damage a copy of a store between two openings, or while it is open; it answers, and can be used again."""
    chance = random.Random(seed)
    shutil.copytree(whole, folder)
    at_work = chance.random() < 0.5
    segment_store = opened(folder) if at_work else None
    for _ in range(chance.choice((1, 1, 2, 4))):
        chance.choice(DAMAGES)(chance, folder)
    caplog.clear()
    segment_store = segment_store or opened(folder)
    found = check(segment_store)
    segment_store.write("model", RECORDS)
    check(segment_store)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    places = [r.module for r in warnings]  # of the folder's secret, and of what is in the folder
    assert len(set(places)) == len(places), [r.getMessage() for r in warnings]
    segment_store.close()
    again = opened(folder)
    for _ in range(5):  # an index that is made again knows the damaged segments again, too
        again.write("model", RECORDS)
        if check(again) == 12:
            break
    else:
        raise AssertionError("what was damaged is not written again")
    again.close()
    shutil.rmtree(folder)
    return found


def test_damaged_files_are_misses_and_one_warning(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = [attack(whole, tmp_path / str(seed), seed, caplog) for seed in range(12)]
    assert 0 < sum(found) < 12 * len(found), "some of it is still there, and some is not"


def test_pipes_and_links_in_the_place_of_files_are_misses(whole: Path, tmp_path: Path) -> None:
    """Whoever opens a pipe waits for its writer, and all prompts would wait with him."""
    shutil.copytree(whole, tmp_path / "kv")
    segment_store = opened(tmp_path / "kv")
    one, other, _ = sorted((tmp_path / "kv").glob("*.safetensors"))
    one.unlink()
    os.mkfifo(one)
    other.unlink()
    other.symlink_to("/dev/zero")
    assert check(segment_store) == 4
    segment_store.close()
    (tmp_path / "kv" / INDEX_NAME).unlink()
    assert check(opened(tmp_path / "kv")) == 4


def test_whatever_happens_while_it_opens_it_is_open_then(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that opens it goes on to write, and those who wait for it go on."""
    shutil.copytree(whole, tmp_path / "kv")
    with monkeypatch.context() as patched:
        patched.setattr("cortexmlx.disk.segment_store.remove_unfinished", lambda path: 1 // 0)
        segment_store = opened(tmp_path / "kv")
    segment_store.wait_until_open()
    assert len(caplog.records) == 1
    segment_store.write("model", RECORDS)
    assert check(segment_store) == 12


@pytest.mark.slow
def test_a_thousand_damages(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(1000, 2000):
        attack(whole, tmp_path / str(seed), seed, caplog)


WRITING = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from support.store.records import opened, record
segment_store = opened(Path(sys.argv[1]), 60_000)
print("begins", flush=True)
for start in range(int(sys.argv[3]), 1 << 30, 3):
    segment_store.write("model", [record(n % 12) for n in range(start, start + 3)])
    segment_store.clear() if start % 50 == 0 else None
"""


def test_writers_that_are_killed_and_others_that_go_on_leave_a_store_that_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes write, evict and clear at once, a third reads, and both are killed at any moment."""
    chance = random.Random(5)
    tests = str(Path(__file__).resolve().parents[1])
    for _ in range(4 if THOROUGH else 1):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITING, str(tmp_path), tests, str(start)],
                stdout=subprocess.PIPE,
                env=os.environ,
            )
            for start in (0, 5)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline()
        segment_store = opened(tmp_path)
        until = time.monotonic() + chance.uniform(0.2, 0.5)
        while time.monotonic() < until:
            check(segment_store)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        check(segment_store)
        segment_store.close()
    last = opened(tmp_path)
    last.write("model", RECORDS)
    assert check(last) == 12
    assert not any(p.stat().st_size for p in tmp_path.glob("*.unfinished")), "what the dead have left is gone"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
