"""What Tab offers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from cortexmlx.cli.chat.input import make_completer
from cortexmlx.cli.chat.slash.command import SlashCommand

COMMANDS = (
    SlashCommand("/save", "FILE", "write it", lambda *_: None, aliases=("/keep",), takes_path=True),
    SlashCommand("/set", "NAME", "change it", lambda *_: None, complete_values=lambda: ["temperature", "top_p"]),
    SlashCommand("/load", "FILE", "read it", lambda *_: None, complete_values=lambda: ["2026-talk"], takes_path=True),
    SlashCommand("/gone", "NAME", "read it", lambda *_: None, complete_values=lambda: os.listdir("no such folder")),
)
KNOWN = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/s", {"/save", "/set"}),
        ("/k", set()),
        ("ave", set()),
        ("/keep no", {"/keep notes.txt"}),
        ("/gone ", set()),
        ("/set t", {"/set temperature", "/set top_p"}),
        ("/set TOP", {"/set top_p"}),
        ("/load ", {"/load 2026-talk", "/load notes.txt", "/load src"}),
        ("/save no", {"/save notes.txt"}),
        ("what is @no", {"what is @notes.txt"}),
        ('@"src/m', {'@"src/main.c'}),
        ("one\n@src/", {"one\n@src/main.c"}),
        ("what is no", set()),
        ("me@no", set()),
        ("one\n/s", set()),
        ("", set()),
    ],
)
def test_commands_arguments_and_paths_are_completed(
    before: str, after: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.c").touch()
    offered = make_completer(KNOWN).get_completions(Document(before), CompleteEvent())
    assert sorted(before[: len(before) + each.start_position] + each.text for each in offered) == sorted(after)
