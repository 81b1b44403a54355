"""Where the questions of a chat come from: lines, several of them between quotes, and the history."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
from pathlib import Path

import pytest

from cortexmlx.cli.chat.input import PlainInput, ensure_private_file


def test_three_quotes_gather_several_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('one\n"""\ntwo\nthree\n"""\nfour'))
    source = PlainInput()
    assert [source.ask() for _ in range(4)] == ["one", '"""\ntwo\nthree\n"""', "four", None]
    source.ask(draft="the old question")
    assert "the old question\n" in capsys.readouterr().err


def test_the_history_is_readable_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat_history"
    assert ensure_private_file(path) and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert ensure_private_file(path) and path.stat().st_mode & 0o777 == 0o600
    assert not ensure_private_file(path / "below a file")


def test_a_program_that_ends_while_an_answer_is_written_leaves_a_terminal_that_echoes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C twice, SIGTERM and SIGHUP close the source, and nothing else behind it."""
    master, slave = pty.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "r") as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        before = termios.tcgetattr(slave)
        source = PlainInput()
        with source.collect_keys():
            assert not termios.tcgetattr(slave)[3] & termios.ECHO
            source.close()
            assert termios.tcgetattr(slave) == before
        with source.collect_keys():
            pass
        assert termios.tcgetattr(slave) == before
