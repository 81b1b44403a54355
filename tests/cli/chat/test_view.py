"""An answer on the screen: all of its text, thoughts apart from it, and figures below it while it is written."""

from __future__ import annotations

import io
import logging
import random
import re

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cortexmlx.cli.chat.view import MarkdownView, PlainTextView
from cortexmlx.cli.start import log_to_stderr
from cortexmlx.core.text import TextKind, ThoughtSplitter
from cortexmlx.stats import BlockMap, GroupBlocks
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.request import TokenEvent
from support.cli.answers import Answer, answer
from support.cli.emulator import Emulator
from support.cli.statuses import status_of
from support.cli.terminal import STOP, Terminal, pieces


def viewed(pieces: list[str], *, thinking: bool = False, folded: bool = False) -> Emulator:
    """The screen after an answer."""
    written = io.StringIO()
    console = Console(file=written, width=60, height=20, force_terminal=True, color_system="256")
    with MarkdownView(console, status_of(3, 100), thinking=thinking, is_folded=folded) as view:
        splitter = ThoughtSplitter(Thoughts("<think>", "</think>", opened_by_prompt=thinking))
        for part in [*(part for piece in pieces for part in splitter.feed(piece)), *splitter.rest()]:
            if part.kind is not TextKind.MARKUP:
                view.feed(part.text, part.kind is TextKind.THOUGHT)
    screen = Emulator(60, 20)
    pyte.Stream(screen).feed(written.getvalue().replace("\n", "\r\n"))
    return screen


def lines_of(screen: Emulator) -> list[str]:
    return [line for line in screen.text_lines() if line]


def test_plain_text_comes_as_it_is_and_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainTextView() as view:
        view.feed("**the")
        assert capsys.readouterr().out == "**the"
        view.feed(" answer**")
    assert capsys.readouterr().out == " answer**\n"


def test_thoughts_are_not_in_the_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainTextView() as view:
        view.feed("so", is_thought=True)
        view.feed("")
        view.feed(" be it", is_thought=True)
        view.feed("Hello")
    assert capsys.readouterr() == ("Hello\n", "so be it\n\n")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_the_whole_answer_is_there_however_it_was_cut(sizes: list[int]) -> None:
    text, pieces = "<think>so be it</think>Hello **there**\n\n- one\n- two\n", []
    at = 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert lines_of(viewed(pieces)) == ["so be it", "Hello there", "• one", "• two"]


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


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_are_set_apart_or_folded_into_one_line(thinking: bool) -> None:
    begun = [] if thinking else ["<think>"]
    said = [*begun, "let me ", "see\n\nonce more", "</think>", "The answer."]
    screen = viewed(said, thinking=thinking)
    assert [line for line in screen.text_lines() if line] == ["let me see", "once more", "The answer."]
    assert screen.buffer[0][0].italics and not screen.buffer[4][0].italics
    assert lines_of(viewed(said, thinking=thinking, folded=True)) == [
        "thought for 0 s (/thoughts shows it)",
        "The answer.",
    ]
    assert lines_of(viewed(["The answer."], folded=True)) == ["The answer."], "who has not thought says nothing of it"


def test_what_is_pending_the_figures_and_the_arena_stand_below_as_far_as_there_is_room() -> None:
    screen, status = Console(file=io.StringIO(), width=80, height=24), status_of(1234, 10_000)
    view = MarkdownView(screen, status, thinking=False)

    def below() -> list[str]:
        return [line.plain.strip() for line in view._status_rows()]

    assert "reading 1,234 tokens" in below()[0]
    with view:
        for _ in range(6):
            view.update_status(TokenEvent("and so ", 1))
            view.feed("and so ")
        view._region.show(*view._take_rows())
        assert [line.plain for line in view._pending_rows()] == ["and so and so and so and so and so and so"]
        assert len(below()) == 1 and re.search(r"6 tokens · TTFT [^·]+ · context 12%$", below()[0])
        assert status.arena is not None
        status.arena.toggle()
        status.arena.newest_map = BlockMap(32, (GroupBlocks(30, None, 1024, 8, bytes([1, 1, 0, 0, 0, 0, 0, 0])),))
        assert below()[-1] == "██······"
        screen.width = 20
        assert below()[0].endswith(" 6 tokens")


SIZES = [(80, 24), (40, 10), (200, 50)]


def ask(terminal: Terminal, made: Answer, seed: int, sizes: list[tuple[int, int]]) -> None:
    """Ask for an answer; the window has another of the sizes after each part."""
    steps: list[str | None] = [*pieces(made.text, seed)]
    for number in range(len(sizes)):
        steps.insert(random.Random(seed + number).randrange(len(steps)), STOP)
    terminal.ask(steps)
    for size in sizes:
        terminal.wait_for_stop()
        terminal.resize(*size)
        terminal.go_on()
    terminal.wait_for_prompt()
    made.check(terminal.answer())


@pytest.mark.parametrize("size", SIZES)
def test_the_window_changes_in_the_middle(size: tuple[int, int]) -> None:
    with Terminal("--no-save", "--max-tokens", "100000", columns=size[0], lines=size[1]) as terminal:
        terminal.wait_for_prompt()
        ask(terminal, answer(SIZES.index(size), blocks=8), 7, [(size[0] // 2 + 12, size[1]), (60, 20)])


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_thirty_answers_in_a_window_that_changes(size: tuple[int, int]) -> None:
    room = {"FAKE_CONTEXT": str(10**9)}
    with Terminal("--no-save", "--max-tokens", "100000", columns=size[0], lines=size[1], environment=room) as terminal:
        terminal.wait_for_prompt()
        for seed in range(30):
            chance = random.Random(seed)
            made = answer(seed, blocks=75 if seed % 6 == 0 else 10)
            assert seed % 6 or made.text.count("\n") > 300
            ask(terminal, made, seed, [*chance.sample([(80, 24), (60, 16), (100, 30), (40, 20)], 2), size])


def test_a_window_of_no_columns_in_the_environment_is_none() -> None:
    with Terminal(environment={"COLUMNS": "0", "LINES": "0"}) as terminal:
        terminal.wait_for_prompt()
        terminal.ask(["The sky", STOP, " is blue."])
        terminal.wait_for_stop()
        terminal.go_on()
        terminal.wait_for_prompt()
        assert terminal.answer() == ["The sky is blue."]


def test_folded_thoughts_are_one_line_whose_end_is_seen_while_it_is_thought() -> None:
    with Terminal("--no-save") as terminal:
        terminal.wait_for_prompt()
        terminal.enter("/thoughts fold", "from now on")
        terminal.ask(["<think>", *pieces("First this.\n\nThen that, and"), STOP, *pieces(" so on.</think>Yes.")])
        terminal.wait_for_stop()
        terminal.shows("Then that, and")
        assert not any("First" in row for row in terminal.screen.rows())
        terminal.go_on()
        terminal.wait_for_prompt()
        thought, gap, answered = terminal.answer()
        assert re.fullmatch(r"thought for \d+ s \(/thoughts shows it\)", thought) and (gap, answered) == ("", "Yes.")
        terminal.enter("/thoughts", "Then that, and so on.")


def test_what_xterm_cuts_off_was_written_before_the_window_got_narrower() -> None:
    """It does not break lines anew; what comes after that is whole."""
    before, after = answer(1, blocks=2), answer(2, blocks=5)
    with Terminal("--no-save", "--max-tokens", "100000", reflow=False) as terminal:
        terminal.wait_for_prompt()
        terminal.ask([*pieces(before.text + "\n\n# Now\n\n"), STOP, *pieces(after.text)])
        terminal.wait_for_stop()
        terminal.shows("Now")
        terminal.resize(columns=50, lines=24)
        terminal.go_on()
        terminal.wait_for_prompt()
        shown = terminal.answer()
        words = Answer(after.text, after.seen, after.loose)
        words.check(shown[shown.index("Now") + 1 :])
