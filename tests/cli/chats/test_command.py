"""`cortexmlx chats`: saved chats are listed, renamed and deleted, and nothing else ever is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from cortexmlx.cli.chats.lock import ChatLock
from cortexmlx.cli.chats.saved_chats import chats_folder
from cortexmlx.cli.start import run
from cortexmlx.system.files import state_folder


@pytest.fixture(autouse=True)
def kept() -> Path:
    """Three chats, of which one is damaged."""
    folder = chats_folder()
    folder.mkdir(parents=True)
    for age, name in enumerate(("2026-11-22-monads", "2026-11-21-haiku", "2026-11-21-haikus")):
        (folder / f"{name}.json").write_text("{torn" * age)
        os.utime(folder / f"{name}.json", (1e9 - age, 1e9 - age))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir())


def test_they_are_listed_the_newest_first(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chats"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "2026-11-22-monads",
        "2026-11-21-haiku",
        "2026-11-21-haikus",
    ]
    assert run(["chats", "--json", "2026-11-21-haiku", "last"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed["chats"]] == ["2026-11-21-haiku", "2026-11-22-monads"]
    assert listed["chats"][0]["bytes"] == 5 and Path(listed["chats"][0]["path"]).exists()
    assert run(["chats", "haiku", "11-22"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "2026-11-21-haiku",
        "2026-11-21-haikus",
        "2026-11-22-monads",
    ]
    assert run(["chats", "monads", "--delete", "--yes"]) == 1 and "no chat 'monads'" in capsys.readouterr().err
    assert run(["chats", "--path", "last"]) == 0
    assert capsys.readouterr().out == f"{kept / '2026-11-22-monads.json'}\n"


def test_without_chats_it_says_so(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in kept.iterdir():
        path.unlink()
    assert run(["chats"]) == 0 and "no chats are saved yet" in capsys.readouterr().err
    assert run(["chats", "--json"]) == 0 and json.loads(capsys.readouterr().out)["chats"] == []


def test_one_is_renamed(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chats", "last", "--rename", "about monads"]) == 0
    assert capsys.readouterr().out == "renamed to about monads\n"
    assert names(kept) == ["2026-11-21-haiku", "2026-11-21-haikus", "about monads"]
    assert run(["chats", "about", "--rename", "2026-11-21-haiku"]) == 1
    assert "there is a chat 2026-11-21-haiku already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../x",
        "/tmp/x",
        "..",
        "-x",
        "a\\b",
        "a\x1b[2J",
        "last",
        "é" * 101,
    ],
)
def test_a_name_that_is_no_plain_file_name_is_refused(name: str, kept: Path) -> None:
    before = names(kept)
    assert run(["chats", "last", f"--rename={name}"]) == 1
    assert names(kept) == before and not (kept.parent / "x.json").exists()


def test_deletion_needs_a_yes(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chats", "last", "--delete"]) == 2 and len(names(kept)) == 3
    assert "--yes deletes without a question" in capsys.readouterr().err
    assert run(["chats", "last", "2026-11-21-haikus", "--delete", "--yes"]) == 0
    assert names(kept) == ["2026-11-21-haiku"]


@pytest.mark.parametrize(
    "options", [["--delete", "-y"], ["--rename", "x"], ["a", "--delete", "--path"], ["a", "b", "--rename", "x"]]
)
def test_what_is_not_named_is_not_touched(options: list[str], kept: Path) -> None:
    assert run(["chats", *options]) == 2 and len(names(kept)) == 3


def test_neither_files_elsewhere_nor_several_at_once_are_meant(kept: Path, tmp_path: Path) -> None:
    other = tmp_path / "mine.json"
    other.touch()
    for name in (str(other), "../chats/2026-11-21-haiku", "2026", "", "*", "none", "haiku"):
        assert run(["chats", name, "--delete", "-y"]) == 1
    assert other.exists() and len(names(kept)) == 3


def test_a_chat_that_is_open_is_neither_renamed_nor_deleted(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = ChatLock.acquire(kept / "2026-11-22-monads.json", state_folder())
    assert lock is not None
    for options in (["--delete", "-y"], ["--rename", "x"]):
        assert run(["chats", "last", *options]) == 1
        assert "2026-11-22-monads is open in a chat: leave that chat first" in capsys.readouterr().err
    lock.release()
    assert run(["chats", "last", "--delete", "-y"]) == 0 and len(names(kept)) == 2


def test_a_chat_that_is_gone_by_then_and_a_link_to_nowhere_break_nothing(kept: Path) -> None:
    (kept / "gone.json").symlink_to("/nowhere/at/all")
    assert run(["chats"]) == 0
    assert run(["chats", "last", "--rename", "gone"]) == 1 and (kept / "2026-11-22-monads.json").exists()


def test_the_time_is_that_of_the_last_turn(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chats", "last"]) == 0
    assert capsys.readouterr().out.startswith(time.strftime("%Y-%m-%d %H:%M", time.localtime(1e9)))


def test_a_chat_takes_one_line_and_a_folder_is_none(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept / "folder.json").mkdir()
    (kept / "two\nlines.json").write_text("")
    assert run(["chats"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 4 and listed[0].endswith("two\u240alines")
    assert run(["chats", "nosuch"]) == 1
    assert "two\u240alines, 2026-11-22-monads" in capsys.readouterr().err
