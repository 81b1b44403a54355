"""Where the questions of a chat come from: lines, several of them between quotes, and the history."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input.typeahead import get_typeahead
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput

from cortexmlx.cli.chat.input import PlainInput, Typeahead, ensure_private_file, make_completer
from cortexmlx.cli.chat.slash.command import SlashCommand


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
    os.mkfifo(path.with_name("pipe"))  # opened to write, it waits for somebody who reads
    assert not ensure_private_file(path.with_name("pipe"))


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


# -- What is typed while nobody asks: nothing of it is shown, cut or lost ---------------------------------------------


Keyboard = tuple[int, Vt100Input, Typeahead]


@pytest.fixture
def keyboard() -> Iterator[Keyboard]:
    """A terminal to type into, what reads it, and what takes its keys meanwhile."""
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal:
        keys = Vt100Input(terminal)
        yield master, keys, Typeahead(keys, DummyOutput())
        get_typeahead(keys)
        os.close(master)


def test_a_long_paste_waits_as_one_and_is_not_shown(keyboard: Keyboard) -> None:
    master, keys, ahead = keyboard
    text = "\n".join(f"line {number} {'é' * 50}" for number in range(400))
    ahead.disable_echo()
    with ahead.collect_keys():
        data = f"ab\r\x1b[200~{text}\x1b[201~\r".encode()
        while data:  # far more than the kernel keeps
            data = data[os.write(master, data[:1000]) :]
        while select.select([keys.fileno()], [], [], 0.05)[0]:
            pass
    pressed = get_typeahead(keys)
    assert [each.key for each in pressed] == ["a", "b", Keys.ControlM, Keys.BracketedPaste, Keys.ControlM]
    assert pressed[3].data == text
    assert not select.select([master], [], [], 0.0)[0], "no echo"


def test_enter_while_the_model_loads_sends_the_line(keyboard: Keyboard) -> None:
    master, keys, ahead = keyboard
    os.write(master, b"hi\rso")
    select.select([keys.fileno()], [], [])
    ahead.disable_echo()
    with ahead.collect_keys():
        while select.select([keys.fileno()], [], [], 0.05)[0]:
            pass
    assert [each.key for each in get_typeahead(keys)] == ["h", "i", Keys.ControlM, "s", "o"]


def test_a_key_that_does_something_at_once_does_it_and_only_by_itself(keyboard: Keyboard) -> None:
    master, keys, ahead = keyboard
    done: list[str] = []
    ahead.disable_echo()
    with ahead.collect_keys({"c-t": lambda: done.append("t")}):
        os.write(master, b"a\x14b\x1b[200~x\x14y\x1b[201~\x14")
        while select.select([keys.fileno()], [], [], 0.05)[0] or len(done) < 2:
            pass
    pressed = get_typeahead(keys)
    assert [each.key for each in pressed] == ["a", "b", Keys.BracketedPaste] and pressed[2].data == "x\x14y"
    assert done == ["t", "t"]


def test_the_terminal_is_left_as_it_was_and_ctrl_c_stays_a_signal_that_throws_nothing_away(keyboard: Keyboard) -> None:
    _, keys, ahead = keyboard
    before = termios.tcgetattr(keys.fileno())
    ahead.disable_echo()
    flags = termios.tcgetattr(keys.fileno())[3]
    assert flags & termios.ISIG and flags & termios.NOFLSH and not flags & (termios.ECHO | termios.ICANON)
    ahead.restore_echo()
    assert termios.tcgetattr(keys.fileno()) == before


# -- What Tab offers --------------------------------------------------------------------------------------------------


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
