"""Transcripts outlive a process, and what is not the server's own is not believed."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cortexmlx.disk.folder import remove_transcripts
from cortexmlx.server.transcripts import RememberedAnswer, RememberedTurn, SavedTranscripts, TranscriptTable
from cortexmlx.sessions.turn import Transcript
from cortexmlx.structured.tools import ToolCall
from support.effort import THOROUGH, examples
from support.patience import PATIENCE

LOTS = 1 << 30
TOKENS = st.lists(st.integers(0, 1 << 20), max_size=5).map(tuple)
CALLS = st.lists(st.builds(ToolCall, st.text(max_size=3), st.text(max_size=3), st.text(max_size=9)), max_size=2)
OMITTED = st.lists(st.just('{"a": 1}'), max_size=2).map(tuple)
ANSWERED = st.builds(
    RememberedAnswer, st.text(), st.text(), CALLS.map(tuple), st.text(), TOKENS, st.text(max_size=3), OMITTED
)
CUTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple)
REMEMBERED = st.builds(
    RememberedTurn,
    st.builds(Transcript, st.text(), TOKENS, CUTS),
    st.integers(0, 9),
    ANSWERED,
    st.lists(ANSWERED, max_size=2).map(tuple),
)
ONE = RememberedTurn(Transcript("a", (1,), ((0, 0), (1, 1))), 1, RememberedAnswer("b", "", (), "b", (2,), "$"))


def keep(folder: Path, *kept: tuple[str, RememberedTurn], identity: str = "model") -> None:
    shelf = SavedTranscripts(folder, identity)
    for client, each in kept:
        shelf.put(client, each)
    shelf.close()


def read(folder: Path, most: int = LOTS, identity: str = "model") -> list[tuple[str, RememberedTurn]]:
    return SavedTranscripts(folder, identity).read(most)


@given(st.lists(st.tuples(st.text(max_size=5), REMEMBERED), max_size=3))
@settings(max_examples=examples(40) if THOROUGH else 8, deadline=None)
def test_what_was_kept_is_read(
    tmp_path_factory: pytest.TempPathFactory, kept: list[tuple[str, RememberedTurn]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    keep(folder, *kept)
    assert {each.id: (client, each) for client, each in read(folder)} == {e.id: (c, e) for c, e in kept}


def test_another_model_has_none_of_it_and_leaves_it(tmp_path: Path) -> None:
    keep(tmp_path, ("key", ONE))
    assert read(tmp_path, identity="another") == []
    assert read(tmp_path) == [("key", ONE)]


def test_nobody_else_reads_it_or_writes_it(tmp_path: Path) -> None:
    keep(tmp_path, ("key", ONE))
    [path] = tmp_path.glob("*.transcript")
    assert path.stat().st_mode & 0o077 == 0
    written = path.read_bytes()
    forged = path.with_name("f" * 32 + ".transcript")
    for data in (written.replace(b'"key"', b'"yek"'), written[:-1], b"", b"{}", b"\0" * 100, written[32:]):
        forged.write_bytes(data)
        assert read(tmp_path) == [("key", ONE)]
        assert not forged.exists(), "what cannot be used is removed"
    forged.symlink_to(path)
    assert read(tmp_path) == [("key", ONE)]


def test_a_folder_with_a_new_secret_forgets(tmp_path: Path) -> None:
    keep(tmp_path, ("key", ONE))
    (tmp_path / "secret").write_bytes(b"x" * 32)
    assert read(tmp_path) == []


def test_what_is_too_much_or_too_old_goes(tmp_path: Path) -> None:
    others = [RememberedTurn(ONE.transcript, number, ONE.answer) for number in range(4)]
    keep(tmp_path, *(("key", each) for each in others))
    for age, each in enumerate(reversed(others)):
        when = time.time() - age * 60
        os.utime(tmp_path / f"{each.id}.transcript", (when, when))
    size = (tmp_path / f"{others[0].id}.transcript").stat().st_size
    assert read(tmp_path, 2 * size + 2) == [("key", each) for each in others[2:]]
    assert len(list(tmp_path.glob("*.transcript"))) == 2
    old = time.time() - 31 * 24 * 3600
    os.utime(tmp_path / f"{others[3].id}.transcript", (old, old))
    assert read(tmp_path) == [("key", others[2])]
    assert remove_transcripts(tmp_path) > 0 and read(tmp_path) == []


def test_models_on_one_folder_have_a_bound_each(tmp_path: Path) -> None:
    keep(tmp_path, ("key", ONE))
    others = [RememberedTurn(ONE.transcript, number, ONE.answer) for number in range(4)]
    keep(tmp_path, *(("key", each) for each in others), identity="another")
    size = (tmp_path / f"{ONE.id}.transcript").stat().st_size
    assert len(read(tmp_path, 2 * size + 8, identity="another")) == 2
    assert read(tmp_path) == [("key", ONE)], "what another model has too much of is no reason to forget this one's"


def test_a_slow_disk_keeps_nothing_waiting_that_the_table_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, written = threading.Event(), threading.Event(), []
    usual = SavedTranscripts._write_file

    def slow(self: SavedTranscripts, client: str, remembered: RememberedTurn) -> None:
        begun.set()
        go_on.wait(PATIENCE)
        written.append(remembered)
        usual(self, client, remembered)

    monkeypatch.setattr(SavedTranscripts, "_write_file", slow)
    shelf = SavedTranscripts(tmp_path, "model")
    shelf.put("key", ONE)
    begun.wait(PATIENCE)
    others = [RememberedTurn(ONE.transcript, number, ONE.answer) for number in range(100)]
    for each in others:
        shelf.put("key", each)
    for each in others[1:]:
        shelf.remove(each)
    assert [asked for asked in shelf._pending_writes.values() if asked is not None] == [("key", others[0])]
    go_on.set()
    shelf.close()
    assert written == [ONE, others[0]]
    assert sorted(each.id for _, each in read(tmp_path)) == sorted([ONE.id, others[0].id])


def test_a_table_goes_on_where_another_ended(tmp_path: Path) -> None:
    shelf = SavedTranscripts(tmp_path, "model")
    table = TranscriptTable(LOTS, shelf)
    table.add("key", ONE)
    longer = RememberedTurn(Transcript("abc", (1, 2, 3)), 2, ONE.answer)
    table.add("key", longer, replaced_turn=ONE)
    shelf.close()
    again = TranscriptTable(LOTS, SavedTranscripts(tmp_path, "model"))
    assert again.find_closest("key", "abcd", []) == longer and again.all() == [("key", longer)]
    assert again.find_closest("another", "abcd", []) is None


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    shelf = SavedTranscripts(tmp_path / "store", "model")
    for path in (tmp_path / "store").iterdir():
        path.unlink()
    (tmp_path / "store").rmdir()
    shelf.put("key", ONE)
    shelf.remove(ONE)
    assert shelf.read(LOTS) == []
    shelf.close()


def test_what_cannot_be_read_now_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path, ("key", ONE))
    shelf = SavedTranscripts(tmp_path, "model")

    def no_more(path: Path) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("cortexmlx.server.transcripts.open_regular_file", no_more)
        assert shelf.read(LOTS) == []
    assert shelf.read(LOTS) == [("key", ONE)]


def test_what_a_dead_process_left_is_no_other_thing_in_the_folder(tmp_path: Path) -> None:
    """The secret can be made anew beside it."""
    keep(tmp_path, ("key", ONE))
    (tmp_path / f".{'0' * 16}.unfinished").write_bytes(b"half")
    (tmp_path / "index.sqlite").touch()
    (tmp_path / "secret").unlink()
    assert read(tmp_path) == []
