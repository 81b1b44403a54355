"""Several answers in a real terminal: of the rows that grow nothing stays, whatever characters are in them."""

from __future__ import annotations

import random
from typing import Any

import pyte
import pytest
from rich.console import Console

from cortexmlx.cli.chat.slash.side_by_side import SideBySideDisplay
from cortexmlx.cli.terminal import drawing
from cortexmlx.types.request import Completion, FinishReason, Timings, TokenEvent, Usage
from support.cli.chat_commands import TerminalText
from support.cli.emulator import Emulator
from support.cli.terminal import STOP, Terminal

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
