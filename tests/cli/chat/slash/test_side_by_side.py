"""Several answers side by side, and the one that is chosen."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from cortexmlx.cli.chat.session import ChatSession, Question
from cortexmlx.cli.chat.slash.side_by_side import SideBySideDisplay, choose_answer
from cortexmlx.errors import InvalidRequest
from cortexmlx.types.request import Completion
from support.cli.chat_commands import TerminalText, printed, run_command


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
    assert choose_answer(answers, lambda prompt: None, screen) is None


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
