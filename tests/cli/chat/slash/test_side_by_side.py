"""Several answers side by side, and the one that is chosen."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from typing import Any

import pyte
import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.slash.commands import LeaveChat
from cortexmlx.cli.chat.slash.side_by_side import SideBySideDisplay, choose_answer
from cortexmlx.cli.terminal import drawing
from cortexmlx.errors import InvalidRequest
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from support.cli.chat_commands import TerminalText, printed, run_command
from support.cli.emulator import Emulator
from support.cli.terminal import STOP, Terminal


def asked(session: ChatSession, screen: Console, count: int) -> Completion:
    return session.ask(Question("!say **what** else", answers=count), SideBySideDisplay(screen, count).show_reply)


@pytest.mark.parametrize(("width", "rows"), [(100, 1), (60, 3)])
def test_answers_stand_side_by_side_where_they_have_room(session: ChatSession, width: int, rows: int) -> None:
    screen = Console(file=io.StringIO(), width=width)
    completion = asked(session, screen, 3)
    lines = [line for line in printed(screen).splitlines() if "what else" in line]
    assert len(completion.others) == 2 and len(lines) == rows
    assert printed(screen).count("what else") == 3 and "3 · 2 tokens" in printed(screen)
    assert session.params.n == 1, "for this turn alone"


def test_they_grow_on_a_terminal_and_leave_no_trace_but_the_whole(session: ChatSession) -> None:
    screen = Console(file=TerminalText(), width=100, height=20, force_terminal=True, color_system=None)
    view = SideBySideDisplay(screen, 3)
    view._texts = ["word " * 400, "one\ntwo", ""]
    shown = [row.plain for row in view._live_rows()]
    assert len(shown) <= 16 and shown[2].endswith("two") and shown[-1].startswith("3 answers")
    completion = session.ask(Question("!say what", answers=3), SideBySideDisplay(screen, 3).show_reply)
    assert printed(screen).rstrip().endswith("what") and len(completion.others) == 2


def test_a_dumb_terminal_gets_whole_answers_and_no_control_sequences(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Console(file=TerminalText(), width=60)
    asked(session, screen, 3)
    assert printed(screen).count("what else") == 3 and "\x1b" not in printed(screen)


def test_one_is_chosen_by_its_number(session: ChatSession, screen: Console) -> None:
    completion = asked(session, screen, 3)
    answers = tuple(replace(each, text=str(i)) for i, each in enumerate((completion, *completion.others)))
    said = iter(["4", "the first", " 2 "])
    assert choose_answer(answers, lambda prompt: next(said), screen) is answers[1]
    assert "'the first' is not a number from 0 to 3" in printed(screen)
    assert choose_answer(answers, lambda prompt: "0", screen) is None
    for leaving in (None, "/bye", " Quit "):
        with pytest.raises(LeaveChat):
            choose_answer(answers, lambda prompt, typed=leaving: typed, screen)


@pytest.mark.parametrize("terminal", [True, False])
def test_they_have_all_their_words_and_control_nothing(session: ChatSession, terminal: bool) -> None:
    screen = Console(file=io.StringIO(), width=80, height=20, force_terminal=terminal, color_system=None)
    session.ask(
        Question("!say <div>\nkept\n</div>\n\n    x = 1\n\nred\x1b]0;title\x07", answers=2),
        SideBySideDisplay(screen, 2).show_reply,
    )
    said = printed(screen)
    assert said.count("<div>") >= 2 and "\nx = 1" in said and "red␛]0;title␇" in said and "\x1b]" not in said


def test_a_number_of_thousands_of_digits_is_none_of_them(session: ChatSession, screen: Console) -> None:
    completion = asked(session, screen, 2)
    said = iter(["1" * 5000, "2"])
    assert choose_answer((completion, *completion.others), lambda prompt: next(said), screen) is completion.others[0]
    with pytest.raises(InvalidRequest, match="2 to 9"):
        run_command(f"/n {'3' * 5000}", session, screen)


# -- Several answers in a real terminal: of the rows that grow nothing stays, whatever characters are in them ---------


EMOJI = ("👩‍💻", "👨‍👩‍👧‍👦", "🏳️‍🌈", "❤️", "🇩🇪", "👍🏽", "1️⃣", "☺️", "天", "é", "e\u0301", "؀", "\u200b", "🎉")


class Replay:
    """A reply that has these words, in each of its answers; between two the window is looked at."""

    def __init__(self, words: list[str], count: int) -> None:
        self.words, self.count = words, count

    def __iter__(self) -> Any:
        for number, word in enumerate(self.words):
            for index in range(self.count):
                yield TokenEvent(word, number, index=index)

    def result(self) -> Completion:
        done = [
            Completion("END", (1,), FinishReason.STOP, Usage(1, 1), Timings(0, 0, 0, 0, 0), index=index)
            for index in range(self.count)
        ]
        object.__setattr__(done[0], "others", tuple(done[1:]))
        return done[0]


@pytest.mark.parametrize("wide", [True, False])
def test_no_row_that_grew_is_left(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminals do not agree on the width of joined emoji: some show its parts, others one sign of two cells."""
    monkeypatch.setattr(drawing, "SOONEST_SECONDS", 0.0)
    monkeypatch.setattr(drawing, "MAX_TIME_SHARE", 0)
    if not wide:
        monkeypatch.setattr("support.cli.emulator.wcwidth", _Joined())
        monkeypatch.setattr("pyte.screens.wcwidth", _Joined())
    for seed in range(3):
        chance = random.Random(seed)
        columns, lines, count = chance.randrange(30, 110), chance.randrange(8, 30), chance.choice((2, 3))
        screen, written = Emulator(columns, lines), TerminalText()
        stream = pyte.Stream(screen)
        console = Console(file=written, width=columns, height=lines, force_terminal=True, color_system="256")
        words = [chance.choice((*EMOJI, "word ", " ", "longer", "\n")) for _ in range(60)]
        SideBySideDisplay(console, count).show_reply(Replay(words, count))  # type: ignore[arg-type]
        stream.feed(written.getvalue().replace("\n", "\r\n"))
        said = [line for line in screen.text_lines() if line]
        assert written.getvalue().count("answers") > 5 and "".join(said).count("END") == count
        assert [line for line in said if not set(line) <= set("123 · tokens END")] == [], seed


class _Joined:
    """The width of a character where what is joined to it takes no room."""

    def __init__(self) -> None:
        self._joined = False

    def __call__(self, char: str) -> int:
        from wcwidth import wcwidth

        joined, self._joined = self._joined, char == "\u200d"
        return 0 if joined else int(wcwidth(char))


@pytest.mark.parametrize(("columns", "lines"), [pytest.param(80, 24, marks=pytest.mark.slow), (40, 10)])
def test_answers_grow_with_joined_emoji_and_leave_the_whole(columns: int, lines: int) -> None:
    with Terminal("--no-history", columns=columns, lines=lines) as terminal:
        terminal.wait_for_prompt()
        family = "👨‍👩‍👧‍👦"
        terminal.script(
            [f"first{family} ", f"{family * 20}\n", STOP, *[f"{family}word " for _ in range(40)], STOP, "end"]
        )
        terminal.type("/n 3 !script\r")
        terminal.wait_for_stop()
        terminal.shows("3 answers")
        terminal.go_on()
        terminal.wait_for_stop()
        terminal.go_on()
        terminal.wait_for("which one goes on?")
        said = "\n".join(terminal.lines())
        assert "3 answers ·" not in said and said.count("first") == 3 and said.count("end") == 3


def test_what_is_typed_meanwhile_reaches_the_choice_and_bye_leaves() -> None:
    with Terminal("--no-history") as terminal:
        terminal.wait_for_prompt()
        terminal.script(["first", STOP, " end"])
        terminal.type("/n 2 !script\r")
        terminal.wait_for_stop()
        terminal.type("3\r/bye\r")
        terminal.go_on()
        terminal.wait_for("'3' is not a number from 0 to 2")
        assert terminal.exit_code() == 0
