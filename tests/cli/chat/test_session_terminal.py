"""A chat that is ended in the middle of an answer: what was said is kept, and the terminal is as it was."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from cortexmlx.sessions.saved import SavedConversation
from support.cli import cli_fakes
from support.cli.terminal import STOP, Terminal

FIGURES = "TTFT 12 ms · prompt"
PROGRAM = (sys.executable, cli_fakes.__file__)
"""A process that starts by itself, as a user's does: here its end is what is tested."""


def kept(tmp_path: Path) -> list[tuple[str, str]]:
    """Roles and texts of the only chat that was kept."""
    (path,) = (tmp_path / "state" / "cortexmlx" / "chats").iterdir()
    return [(str(m["role"])[0], str(m["content"])) for m in SavedConversation.read(path).messages]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_the_answer_so_far_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Terminal("--no-history", program=PROGRAM) as terminal:
        terminal.wait_for_prompt()
        terminal.enter("one", FIGURES)
        terminal.ask(["some words", STOP])
        terminal.wait_for_stop()
        terminal.shows("some words")
        terminal.shows("context 1%")
        os.kill(terminal.pid, number)
        assert terminal.exit_code() == 128 + number
        said = [row for row in terminal.screen.rows() if "TTFT" in row]
        assert len(said) == 1, "those of the first answer, and nothing of what came and went"
        assert "saved: cortexmlx chat --resume " in str(terminal)
        for on, off in ((b"\x1b[?25h", b"\x1b[?25l"), (b"\x1b[?2004l", b"\x1b[?2004h")):
            assert terminal.raw.rfind(on) > terminal.raw.rfind(off), "the cursor is there, and a paste comes as it is"
    assert kept(tmp_path) == [("u", "one"), ("a", "You said: one"), ("u", "!script"), ("a", "some words")]
    assert not [*(tmp_path / "state" / "cortexmlx" / "locks").iterdir()]


def test_a_window_that_is_closed_before_the_first_word_keeps_the_question_which_can_be_asked_again(
    tmp_path: Path,
) -> None:
    with Terminal("--no-history", program=PROGRAM) as terminal:
        terminal.wait_for_prompt()
        terminal.ask([STOP, "never"])
        terminal.wait_for("reading 25 tokens")
        assert terminal.hang_up() == 128 + signal.SIGHUP
    assert kept(tmp_path) == [("u", "!script")]
    with Terminal("--no-history", "--resume") as terminal:
        terminal.wait_for("the last question has no answer yet: /regen asks it again")
        terminal.wait_for_prompt()
        terminal.type("/edit again\r")
        terminal.wait_for(FIGURES)
    assert kept(tmp_path) == [("u", "again"), ("a", "You said: again")]


@pytest.mark.slow
def test_an_answer_that_is_written_again_stays_until_the_new_one_has_begun(tmp_path: Path) -> None:
    for steps, answer in (([STOP], "whole"), (["half", STOP], "half")):
        with Terminal("--no-history", *(["--resume"] if answer == "half" else [])) as terminal:
            terminal.wait_for_prompt()
            if answer == "whole":
                terminal.ask(["whole"])
                terminal.wait_for(FIGURES)
                terminal.wait_for_prompt()
            terminal.script(steps)
            terminal.type("/regen\r")
            terminal.wait_for_stop()
            os.kill(terminal.pid, signal.SIGTERM)
            assert terminal.exit_code() == 143
        assert kept(tmp_path) == [("u", "!script"), ("a", answer)]
