"""The status of an answer in a real terminal: a long prompt, a stop while it is computed, the arena below answers."""

from __future__ import annotations

import random
import time

import pytest

from support.cli.terminal import STOP, Terminal, pieces

SIZES = [(80, 24), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((40, 10), (200, 50)))]


@pytest.mark.parametrize(("columns", "lines"), SIZES)
def test_a_long_prompt_says_how_far_it_is_and_a_stop_is_heard_at_once(columns: int, lines: int) -> None:
    with Terminal("--no-history", columns=columns, lines=lines, held=True) as terminal:
        terminal.wait_for_prompt()
        terminal.type("!read 40\r")
        terminal.go_on()
        terminal.shows("reading 100 of 4,000")
        terminal.type("\x03")
        terminal.shows("stopping")
        terminal.go_on()
        terminal.wait_for_prompt()
        assert any("stopped before the first word" in line for line in terminal.lines())
        terminal.type("hello\r")
        terminal.wait_for("You said: hello")
        terminal.wait_for_prompt()
        assert not any("reading" in line or "stopping" in line for line in terminal.lines()), "nothing of it stays"


def test_a_key_shows_and_hides_the_arena_while_an_answer_is_written() -> None:
    with Terminal("--no-history", columns=80, lines=24) as terminal:
        terminal.wait_for_prompt()
        terminal.ask([*pieces("The sky is blue, "), STOP, *pieces("and the grass is green.")])
        terminal.wait_for_stop()
        terminal.shows("TTFT")
        assert not any("▒" in row for row in terminal.screen.rows())
        terminal.type("a\x14b")
        terminal.shows("███▒▒·")
        terminal.type("\x14")
        terminal.wait_until(lambda: not any("▒" in row for row in terminal.screen.rows()), "the end of the picture")
        terminal.go_on()
        terminal.wait_until(lambda: ">>> ab" in terminal.screen.rows(), "what was typed besides")
        assert terminal.answer() == ["The sky is blue, and the grass is green."]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 10), (200, 50)])
def test_the_arena_is_drawn_below_an_answer_until_it_is_asked_again(columns: int, lines: int) -> None:
    with Terminal("--no-history", columns=columns, lines=lines) as terminal:
        terminal.wait_for_prompt()
        terminal.type("/blocks live\r")
        terminal.wait_for("/blocks ends it")
        terminal.wait_for_prompt()
        terminal.ask([*pieces("The sky is blue, "), STOP, *pieces("and the grass is green.")])
        terminal.wait_for_stop()
        terminal.shows("██▒·" if columns == 40 else "███▒▒·")
        terminal.go_on()
        terminal.wait_for_prompt()
        assert terminal.answer() == ["The sky is blue, and the grass is green."]
        assert not any("▒" in line for line in terminal.lines()), "it goes with the answer's end"
        terminal.type("/blocks\r")
        terminal.wait_for("not drawn any more")
        terminal.shows("▒▒")
        terminal.wait_for_prompt()
        before = terminal.raw.count("▒".encode())
        terminal.ask([*pieces("Yes, "), STOP, *pieces("it is.")])
        terminal.wait_for_stop()
        terminal.shows("TTFT")
        terminal.go_on()
        terminal.wait_for_prompt()
        assert terminal.raw.count("▒".encode()) == before


@pytest.mark.slow
def test_a_window_that_changes_all_the_time_while_a_prompt_is_read_keeps_nothing_of_it() -> None:
    with Terminal("--no-history", "--no-save", columns=100, lines=30) as terminal:
        terminal.wait_for_prompt()
        terminal.type("!read 4\r")
        terminal.shows("reading")
        chance = random.Random(1)
        for _ in range(300):
            terminal.resize(chance.randrange(20, 160), chance.randrange(5, 50))
            time.sleep(0.005)
        terminal.resize(80, 24)
        terminal.wait_for_prompt()
        said = terminal.lines()
        assert [line for line in said if "reading" in line] == [] and said.count("That was long.") == 1
