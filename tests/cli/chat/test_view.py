"""An answer on the screen: all of its text, thoughts apart from it, and figures below it while it is written."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cortexmlx.cli.chat.view import MarkdownView, RawView
from cortexmlx.cli.start import log_to_stderr
from cortexmlx.request import TokenEvent
from cortexmlx.stats import BlockMap, GroupBlocks
from support.statuses import status_of


def viewed(pieces: list[str], *, thinking: bool = False, terminal: bool = False) -> str:
    """What is left on the screen."""
    screen = Console(
        file=io.StringIO(), width=60, force_terminal=terminal, color_system="standard" if terminal else None
    )
    with MarkdownView(screen, status_of(3, 100), thinking=thinking) as view:
        for piece in pieces:
            view.feed(piece)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_plain_text_comes_as_it_is_and_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with RawView() as view:
        view.feed("**the")
        assert capsys.readouterr().out == "**the"
        view.feed(" answer**")
    assert capsys.readouterr().out == " answer**\n"


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_the_whole_answer_is_there_however_it_was_cut(sizes: list[int]) -> None:
    text, pieces = "<think>so be it</think>Hello **there**\n\n- one\n- two\n", []
    at = 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    words = viewed(pieces).split()
    assert words == ["so", "be", "it", "Hello", "there", "•", "one", "•", "two"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_goes_above_the_figures_or_to_a_file(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stderr(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setenv("TERM", "xterm")
    before, stderr = logging.getLogger().handlers[:], Stderr()
    monkeypatch.setattr("sys.stderr", stderr)
    screen = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    try:
        log_to_stderr(debug=False)
        with MarkdownView(screen, status_of(3, 100), thinking=False) as view:
            view.feed("Hello")
            logging.getLogger("cortexmlx").warning("the [disk] is full")
    finally:
        logging.getLogger().handlers[:] = before
    assert isinstance(screen.file, io.StringIO)
    said = "cortexmlx: the [disk] is full\n"
    assert (said in screen.file.getvalue(), stderr.getvalue()) == ((True, "") if terminal else (False, said))


def test_what_could_have_become_a_tag_is_text_in_the_end() -> None:
    assert viewed(["2 ", "<"]).split() == ["2", "<"]


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_are_dim_and_apart(thinking: bool) -> None:
    begun = [] if thinking else ["<think>"]
    said = viewed([*begun, "let me see", "</think>", "The answer."], thinking=thinking, terminal=True)
    thought, answer = (next(line for line in said.splitlines() if word in line) for word in ("let me", "answer."))
    assert "\x1b[2;3m" in thought and "\x1b[2;3m" not in answer
    assert said.index("let me") < said.index("answer.")


def test_while_it_is_written_its_last_words_the_figures_and_the_arena_stand_below() -> None:
    screen = Console(file=io.StringIO(), width=80, height=24)
    status = status_of(1234, 10_000)
    view = MarkdownView(screen, status, thinking=False)

    def below() -> str:
        with screen.capture() as shown:
            screen.print(view._below())
        return shown.get()

    assert "reading 1,234 tokens" in below()
    with view:
        for _ in range(6):
            view.note(TokenEvent("and so ", 1))
            view.feed("and so ")
        assert "6 tokens · TTFT 0.0 s · context 12%" in below()
        assert below().startswith("and so"), "the words of the line that is not final"
        assert status.arena is not None
        assert len(below().splitlines()) == 1
        status.arena.toggle()
        status.arena.newest = BlockMap(32, (GroupBlocks(30, None, 1024, 8, bytes([1, 1, 0, 0, 0, 0, 0, 0])),))
        assert below().splitlines()[-1].strip() == "██······"
