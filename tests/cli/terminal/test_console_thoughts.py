"""Thoughts go to stderr, dim where a person looks, and leave stdout to the answer."""

from __future__ import annotations

import io

import pytest

from cortexmlx.cli.terminal.console import ThoughtsPrinter


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
    printer.show("so ")
    printer.show("be it")
    printer.end()
    printer.end()
    assert stderr.getvalue() == wanted


def test_hidden_ones_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    printer = ThoughtsPrinter(hidden=True)
    printer.show("so")
    printer.end()
    assert capsys.readouterr() == ("", "")
