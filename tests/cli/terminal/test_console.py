"""Where output goes, and what a stream cannot show."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.console import ThoughtsPrinter
from support.cli import cli_fakes
from support.cli.chat_commands import TerminalText

FAKE_COMMAND = [sys.executable, cli_fakes.__file__]


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*FAKE_COMMAND, "generate", "fake", "-p", "né"], capture_output=True, env=environment, stdin=-3
    )
    assert (done.returncode, done.stdout) == (0, b"You said: n?\n")


@pytest.mark.parametrize(
    ("environment", "stream", "terminal", "coloured"),
    [
        ({"TERM": "xterm"}, TerminalText, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, TerminalText, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, TerminalText, True, True),
        ({"TERM": "dumb"}, TerminalText, False, False),
        ({"TERM": "xterm"}, io.StringIO, False, False),
    ],
)
def test_colours_go_to_a_person_who_wants_them(
    environment: dict[str, str],
    stream: type[io.StringIO],
    terminal: bool,
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", stream())
    assert (console.is_terminal(sys.stderr), console.is_coloured(sys.stderr)) == (terminal, coloured)
    console.print_error("no such thing")
    console.print_note("by the way")
    said, noted = sys.stderr.getvalue().splitlines()
    assert said == ("\x1b[1;31merror:\x1b[0m no such thing" if coloured else "error: no such thing")
    assert noted == "cortexmlx: by the way"


def test_an_error_and_a_note_break_at_words_and_a_pipe_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word{number}" for number in range(40)]
    monkeypatch.setenv("TERM", "xterm")
    for stream, most in ((TerminalText(), console.NARROW), (io.StringIO(), 1000)):
        monkeypatch.setattr(sys, "stderr", stream)
        console.print_error(" ".join(words))
        console.print_note(" ".join(words))
        lines = stream.getvalue().replace("\x1b[1;31m", "").replace("\x1b[0m", "").splitlines()
        assert max(map(len, lines)) <= most and (len(lines) == 2) is (most == 1000)
        assert " ".join(lines).split() == ["error:", *words, "cortexmlx:", *words]


WIDE = """\
  one     all of it fits
  two     a text of a few words that is
          longer
  a long label
          beside
"""
NARROW = """\
  one
    all of it
    fits
  two
    a text of a
    few words
    that is
    longer
  a long label
    beside
"""


@pytest.mark.parametrize(("width", "shown"), [(40, WIDE), (15, NARROW)])
def test_rows_keep_their_texts_in_one_column_or_below_the_labels_of_a_narrow_window(width: int, shown: str) -> None:
    out = io.StringIO()
    rows = [
        ("  one", "all of it fits"),
        ("  two", "a text of a few words that is longer"),
        ("  a long label", "beside"),
    ]
    console.print_rows(Console(file=out, width=width), rows, 10)
    assert out.getvalue() == shown


@pytest.mark.parametrize(
    ("terminal", "no_color", "wanted"),
    [(True, "", "\x1b[2mso be it\x1b[0m\n\n"), (True, "1", "so be it\n\n"), (False, "", "so be it\n\n")],
)
def test_they_are_dim_on_a_terminal_and_end_once(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_color: str, wanted: str
) -> None:
    class Stderr(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    stderr = Stderr()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    printer = ThoughtsPrinter()
    printer.end()
    printer.print_thought("so ")
    printer.print_thought("be it")
    printer.end()
    printer.end()
    assert stderr.getvalue() == wanted


def test_hidden_ones_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printer = ThoughtsPrinter(hidden=True)
    printer.print_thought("so")
    printer.end()
    assert capsys.readouterr() == ("", "")
