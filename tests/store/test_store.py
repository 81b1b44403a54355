"""A store for one engine: what is offered is there for the next, in the time that closing may take."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cortexmlx.store.store import KVStore, open_shelf
from cortexmlx.store.threads import Reading
from support.patience import PATIENCE
from support.records import record, same

RECORDS = [record(n) for n in range(6)]


def store(path: Path) -> KVStore:
    shelf = open_shelf(path, 1 << 30)
    assert shelf is not None
    return KVStore(shelf, "model")


def test_the_next_store_reads_what_the_last_was_closed_with(tmp_path: Path) -> None:
    one = store(tmp_path)
    assert one.has_room and one.offer(RECORDS)
    one.close()
    assert one.stats().stored_blocks == 6
    other = store(tmp_path)
    assert other._shelf.secret == one._shelf.secret
    done, found = threading.Event(), {}
    tokens = {r.key: r.tokens for r in RECORDS}
    other.ask(Reading(tokens, lambda there, rate: list(there), lambda got: (found.update(got), done.set()), 9.0))  # type: ignore[arg-type, return-value]
    assert done.wait(PATIENCE) and all(same(found[r.key], r) for r in RECORDS)
    other.drop(3)
    other.close()
    said = other.stats()
    assert (said.read_blocks, said.missed_blocks, said.dropped_blocks) == (6, 0, 3)
    assert said.read_bytes == sum(r.nbytes for r in RECORDS) and said.path == str(tmp_path)


def test_a_folder_that_cannot_be_used_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert open_shelf(tmp_path / "file" / "store", 1 << 30) is None
    assert len(caplog.records) == 1 and "cannot be used" in caplog.text
