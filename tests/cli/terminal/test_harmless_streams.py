"""A guarded stream is a text stream like any other, but for what a terminal would obey."""

from __future__ import annotations

import io
import os
import pty
import sys

import pytest
import typer

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import Guarded, guarded_streams, unguarded


class Window(io.StringIO):
    encoding, errors = "utf-8", "replace"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_what_others_print_is_harmless_and_our_own_sequences_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Window()
    monkeypatch.setattr(sys, "stdout", window)
    with guarded_streams():
        print("a\x1b[2J", end="")
        typer.echo("\x1b]0;b\x07")
        sys.stdout.writelines(["c\r", "d\n"])
        console.control(sys.stdout, "\x1b[0m")
        assert isinstance(sys.stdout, Guarded) and not hasattr(sys.stdout, "buffer")
        assert (sys.stdout.encoding, sys.stdout.errors, sys.stdout.isatty()) == ("utf-8", "replace", True)
        with pytest.raises((TypeError, AttributeError)):
            sys.stdout.write(b"\x1b[2J")  # type: ignore[arg-type]
    assert sys.stdout is window
    assert window.getvalue() == "a␛[2J␛]0;b␇\ncd\n\x1b[0m"


def test_files_and_pipes_get_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    with guarded_streams():
        assert sys.stdout is pipe and unguarded(pipe) is pipe
        console.say("a\x1b[2J\u202e")
    assert pipe.getvalue() == "a\x1b[2J\u202e\n"


def test_a_guard_leaves_the_stream_below_open() -> None:
    below = Window()
    with Guarded(below) as guarded:
        guarded.write("a")
    guarded.close()
    assert not below.closed and below.getvalue() == "a"


def test_a_terminal_whose_encoding_is_ascii_has_no_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """typer looks for a stream of bytes below one that it takes for misconfigured."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="ascii", errors="replace") as window:
        monkeypatch.setattr(sys, "stderr", window)
        with guarded_streams():
            typer.echo("\x1b]0;b\x07c", err=True)
    assert os.read(master, 100) == b"?]0;b?c\r\n"
    os.close(master)
