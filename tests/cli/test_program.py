"""Suggested commands can be typed as they are: by the way the program was started."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from cortexmlx.cli import program
from cortexmlx.cli.app import COMMANDS, EXAMPLES
from cortexmlx.cli.chats.saved_chats import chats_folder, resume_command
from cortexmlx.cli.program import STARTED_BY, adapt_commands
from cortexmlx.cli.start import run
from cortexmlx.errors import ModelNotFound
from cortexmlx.models.resolve import resolve_model


def start(monkeypatch: pytest.MonkeyPatch, *argv: str, path: str = "", by: str = "") -> None:
    monkeypatch.setattr(sys, "argv", list(argv))
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv(STARTED_BY, by)


def test_the_program_is_called_as_it_was_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "a b" / "cortexmlx"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    start(monkeypatch, str(script))
    assert shlex.split(adapt_commands("`cortexmlx models`").strip("`")) == [str(script), "models"]
    start(monkeypatch, str(script), path=str(script.parent))
    assert adapt_commands("`cortexmlx models`") == "`cortexmlx models`"
    (tmp_path / "cortexmlx").mkdir()
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "cortexmlx", "models"])
    start(monkeypatch, str(tmp_path / "cortexmlx" / "__main__.py"))
    assert adapt_commands("see `cortexmlx models`, or cortexmlx --help") == (
        "see `.venv/bin/python -m cortexmlx models`, or .venv/bin/python -m cortexmlx --help"
    )
    start(monkeypatch, "/somewhere/pytest/__main__.py")
    assert adapt_commands("`cortexmlx models`") == "`cortexmlx models`"


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("`cortexmlx chat` talks", "`make chat` talks"),
        ("cortexmlx chat --resume 'a b'", "make chat ARGS='--resume '\"'\"'a b'\"'\"''"),
        ("cortexmlx chat --resume x$y", "make chat ARGS='--resume '\"'\"'x$$y'\"'\"''"),
        ("first: cortexmlx chat org/name", "first: make chat MODEL=org/name"),
        ("cortexmlx serve org/name --port 80", "make serve MODEL=org/name ARGS='--port 80'"),
        ("`cortexmlx models` lists it", "`.venv/bin/cortexmlx models` lists it"),
        ("head FILE | cortexmlx eval MODEL -", "head FILE | .venv/bin/cortexmlx eval MODEL -"),
        ("cortexmlx does not run it", "cortexmlx does not run it"),
        ("one version of cortexmlx on all", "one version of cortexmlx on all"),
        ("~/.cache/cortexmlx models", "~/.cache/cortexmlx models"),
        ("cortexmlx chat 'it", ".venv/bin/cortexmlx chat 'it"),
    ],
)
def test_what_make_started_is_continued_by_make(monkeypatch: pytest.MonkeyPatch, said: str, typed: str) -> None:
    start(monkeypatch, ".venv/bin/cortexmlx", by="make")
    assert adapt_commands(said) == typed
    assert adapt_commands(typed) == typed


def test_the_end_of_a_chat_wrong_usage_help_and_errors_of_the_library_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, ".venv/bin/cortexmlx", by="make")
    assert resume_command(chats_folder() / "tea.json") == "make chat ARGS='--resume tea'"
    with pytest.raises(ModelNotFound) as missing:
        resolve_model("no-such")
    assert "`cortexmlx models`" in str(missing.value)
    for arguments in (
        ["eval", "no-such", __file__],
        ["pull", "org/name"],
        ["chats", "--delete"],
        ["chat", "--nonsense"],
        ["--help"],
        ["chats", "--help"],
    ):
        run(arguments)
        said = "".join(capsys.readouterr())
        assert re.search(r"(?<![/\w])cortexmlx (?!--)[a-z]", said.replace("\n", " ")) is None, said
        assert ".venv/bin/cortexmlx" in said or "make chat" in said


def test_every_command_is_known() -> None:
    assert set(program.COMMANDS.split("|")) == {name for name, _, _ in COMMANDS}
    assert adapt_commands(EXAMPLES) == EXAMPLES
