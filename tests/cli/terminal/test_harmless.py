"""Which characters a terminal gets, and which are shown as something else."""

from __future__ import annotations

import io
import os
import pty
import sys
import unicodedata

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import (
    ControlFilter,
    filter_streams,
    make_prompt_output,
    strip_controls,
    to_single_line,
    unfiltered,
)
from support.cli.hostile import BIDI, HOSTILE, is_obeyed, offences


@pytest.mark.parametrize(
    "text",
    [
        "plain ASCII,\twith\nlines",
        "שלום עולם",
        "مرحبا بالعالم",
        "می‌خواهم",  # with a joiner inside the word
        "क्‍ष",
        "👩‍👩‍👧‍👦 👍🏽 ❤️ 🇫🇷",
        "天空是蓝色的。",
        "naïve café — “quotes” … ½",
    ],
)
def test_usual_text_stays_as_it_is(text: str) -> None:
    assert strip_controls(text) == text


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys_or_turns(text: str) -> None:
    assert not any(is_obeyed(sign) for sign in strip_controls(text))
    assert strip_controls(strip_controls(text)) == strip_controls(text)


@given(st.text(), st.integers(0, 50))
def test_a_sequence_in_two_pieces_is_as_harmless(text: str, at: int) -> None:
    assert strip_controls(text[:at]) + strip_controls(text[at:]) == strip_controls(text)


def test_every_character_that_turns_text_is_known() -> None:
    """As the Unicode database of Python has them."""
    turning = {
        chr(c)
        for c in range(0x110000)
        if unicodedata.bidirectional(chr(c)) in {*["LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"]}
    }
    assert turning <= set(BIDI) and not any(sign in strip_controls("".join(turning)) for sign in turning)


def test_hostile_text_is_seen_and_a_name_stays_in_its_line() -> None:
    assert strip_controls("a\x1b[2Jb\x07 \x9bc\x08\x7f\r\nd") == "a␛[2Jb␇ \ufffdc␈␡\nd"
    assert strip_controls("safe\u202egpj.exe\u200e") == "safe\ufffdgpj.exe"
    assert to_single_line("model\nerror: pay\r\there") == "model␊error: pay␍␉here"
    for text in HOSTILE:
        assert not any(is_obeyed(sign) for sign in strip_controls(text))


def test_text_is_harmless_and_movements_are_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as window:
        monkeypatch.setattr(sys, "stdout", window)
        output = make_prompt_output()
        for text in HOSTILE:
            output.write(text.replace("\r", ""))
        output.write("[\u202e]\r\n")  # turns the order of letters, and takes no cell
        output.cursor_backward(1)
        output.cursor_backward(0)
        output.enable_bracketed_paste()
        output.flush()
        written = os.read(master, 65536)
    os.close(master)
    assert offences(written) == [] and b"[]\r\r\n" in written and written.endswith(b"\x1b[1D\x1b[?2004h")


class Window(io.StringIO):
    encoding, errors = "utf-8", "replace"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_what_others_print_is_harmless_and_our_own_sequences_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Window()
    monkeypatch.setattr(sys, "stdout", window)
    with filter_streams():
        print("a\x1b[2J", end="")
        typer.echo("\x1b]0;b\x07")
        sys.stdout.writelines(["c\r", "d\n"])
        console.write_control(sys.stdout, "\x1b[0m")
        assert isinstance(sys.stdout, ControlFilter) and not hasattr(sys.stdout, "buffer")
        assert (sys.stdout.encoding, sys.stdout.errors, sys.stdout.isatty()) == ("utf-8", "replace", True)
        with pytest.raises((TypeError, AttributeError)):
            sys.stdout.write(b"\x1b[2J")  # type: ignore[arg-type]
    assert sys.stdout is window
    assert window.getvalue() == "a␛[2J␛]0;b␇\ncd\n\x1b[0m"


def test_files_and_pipes_get_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    with filter_streams():
        assert sys.stdout is pipe and unfiltered(pipe) is pipe
        console.print_result("a\x1b[2J\u202e")
    assert pipe.getvalue() == "a\x1b[2J\u202e\n"


def test_a_guard_leaves_the_stream_below_open() -> None:
    below = Window()
    with ControlFilter(below) as guarded:
        guarded.write("a")
    guarded.close()
    assert not below.closed and below.getvalue() == "a"


def test_a_terminal_whose_encoding_is_ascii_has_no_way_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """typer looks for a stream of bytes below one that it takes for misconfigured."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="ascii", errors="replace") as window:
        monkeypatch.setattr(sys, "stderr", window)
        with filter_streams():
            typer.echo("\x1b]0;b\x07c", err=True)
    assert os.read(master, 100) == b"?]0;b?c\r\n"
    os.close(master)
