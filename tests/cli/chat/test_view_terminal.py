"""Answers in a real terminal: what is left on the screen and in the scrollback is their text, once, at any size."""

from __future__ import annotations

import random
import re

import pytest

from support.cli.answers import Answer, answer
from support.cli.terminal import STOP, Terminal, pieces

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
        terminal.type("/thoughts fold\r")
        terminal.wait_for("from now on")
        terminal.wait_for_prompt()
        terminal.ask(["<think>", *pieces("First this.\n\nThen that, and"), STOP, *pieces(" so on.</think>Yes.")])
        terminal.wait_for_stop()
        terminal.shows("Then that, and")
        assert not any("First" in row for row in terminal.screen.rows())
        terminal.go_on()
        terminal.wait_for_prompt()
        thought, gap, answered = terminal.answer()
        assert re.fullmatch(r"thought for \d+ s \(/thoughts shows it\)", thought) and (gap, answered) == ("", "Yes.")
        terminal.type("/thoughts\r")
        terminal.wait_for("Then that, and so on.")
        terminal.wait_for_prompt()


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
