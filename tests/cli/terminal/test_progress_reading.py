"""The bar of a long prompt: on stderr, where a person looks, and gone before the answer begins."""

from __future__ import annotations

import io
import sys

import pytest

from cortexmlx.cli.terminal.progress import PrefillProgress, how_far
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import TokenEvent
from support.cli.terminal import Terminal

CHUNK = TokenEvent("", progress=Progress("prefilling", 1024, 4096, cached=512))


def test_it_says_what_is_done_and_what_was_there() -> None:
    assert how_far(Progress("prefilling", 0, 4096)) == "reading 0 of 4,096 tokens"
    assert CHUNK.progress is not None and how_far(CHUNK.progress) == "reading 1,024 of 4,096 tokens, 512 cached"


def test_elsewhere_than_on_a_terminal_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with PrefillProgress() as reading:
        reading.note(CHUNK)
        reading.stopping()
        reading.note(TokenEvent("a", 1))
    assert stderr.getvalue() == ""


def test_generate_shows_how_far_the_prompt_is_and_then_the_answer_alone() -> None:
    with Terminal(columns=100, lines=10, held=True, command=("generate", "fake", "-p", "!read 3")) as terminal:
        for done in (0, 100, 200):
            terminal.shows(f"reading {done} of 300 tokens")
            terminal.go_on()
        terminal.shows("That was long.")
        assert terminal.exit_code() == 0
        assert next(line for line in terminal.lines() if line) == "That was long."
        assert not any("reading" in line for line in terminal.lines())


@pytest.mark.parametrize("options", [(), pytest.param(("--json",), marks=pytest.mark.slow)])
def test_a_stop_is_heard_at_once_and_ends_with_the_piece(options: tuple[str, ...]) -> None:
    command = ("generate", "fake", "-p", "!read 60", *options)
    with Terminal(columns=100, lines=10, held=True, command=command) as terminal:
        terminal.shows("reading 0 of 6,000 tokens")
        terminal.go_on()
        terminal.shows("reading 100 of 6,000 tokens")
        terminal.type("\x03")
        terminal.shows("stopping")
        terminal.go_on()
        assert terminal.exit_code() == 130
        assert not any("stopping" in line for line in terminal.lines())
