"""/model in a real terminal: another model that is given up or cannot be had leaves the chat as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli.terminal import Terminal


@pytest.mark.parametrize(
    ("model", "doing", "far"),
    [
        ("org/slow", "loading org/slow", " 1%"),
        pytest.param("org/large", "downloading org/large", "6 of 600 MiB", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_gives_the_other_model_up_and_not_the_chat(model: str, doing: str, far: str) -> None:
    with Terminal("--no-history") as terminal:
        terminal.wait_for_prompt()
        terminal.enter("one")
        terminal.type(f"/model {model}\r")
        terminal.shows(doing)
        terminal.shows(far)
        terminal.type("\x03")
        terminal.wait_for("given up: fake goes on, and nothing has changed")
        terminal.wait_for_prompt()
        assert not any("ing org/" in row for row in terminal.screen.rows()), "the bar is gone"
        assert not terminal.screen.cursor.hidden
        terminal.enter("/show messages", "You said: one")
        terminal.enter("two", "You said: two")
        terminal.type("/bye\r")
        assert terminal.exit_code() == 0


def test_an_error_of_any_kind_while_another_is_loaded_leaves_the_chat_as_it_was() -> None:
    with Terminal("--no-history", columns=200) as terminal:
        terminal.wait_for_prompt()
        for model, says in (
            ("org/missing", "error: no model 'org/missing'"),
            ("org/broken", "error: org/broken cannot be loaded (RuntimeError: a bug); fake goes on"),
            ("org/memory", "error: org/memory cannot be loaded (MemoryError); fake goes on"),
        ):
            terminal.enter(f"/model {model}", says)
        terminal.enter("/set kv_memory 1GB", "loaded again")
        terminal.enter("two", "You said: two")


@pytest.mark.slow
def test_ctrl_c_twice_leaves_with_the_terminal_as_it_was(tmp_path: Path) -> None:
    twice = tmp_path / "twice"  # while it is there, a Ctrl-C is the second within a second
    with Terminal("--no-history", environment={"FAKE_TWICE": str(twice)}) as terminal:
        terminal.wait_for_prompt()
        terminal.type("/model org/slow\r")
        terminal.shows(" 1%")
        terminal.type("\x03")
        terminal.wait_for("given up")
        terminal.wait_for_prompt()
        twice.touch()
        terminal.type("\x03")
        assert terminal.exit_code() == 130
        assert not terminal.screen.cursor.hidden
