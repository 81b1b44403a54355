"""Answers in a real terminal: what is left on the screen and in the scrollback is their text, once."""

from __future__ import annotations

from support.terminal import STOP, Terminal, pieces


def test_an_answer_is_there_once_and_while_it_is_written() -> None:
    with Terminal("--no-history", columns=80, lines=10) as terminal:
        terminal.wait_for_prompt()
        terminal.ask([*pieces("# Colours\n\nThe sky is blue, and"), STOP, *pieces(" the grass is green.")])
        terminal.wait_for_stop()
        terminal.shows("tok/s")
        terminal.go_on()
        terminal.wait_for_prompt()
        assert terminal.answer() == ["Colours", "", "The sky is blue, and the grass is green."]
        terminal.type("/exit\r")
        assert terminal.exit_code() == 0
