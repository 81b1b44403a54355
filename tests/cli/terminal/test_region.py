"""Rows that come and go below what stays, in windows that change while nobody has been told."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

import pyte
import pytest
from rich.console import Console
from rich.text import Text

from cortexmlx.cli.terminal.region import BEGIN, END, AboveRegionWriter, LiveRegion
from support.cli.emulator import Emulator


class Window:
    """A region and the screen that it is shown on."""

    def __init__(self, columns: int = 20, lines: int = 6, *, reflow: bool = True) -> None:
        self.screen, self.written = Emulator(columns, lines, reflow=reflow), io.StringIO()
        self.console = Console(file=self.written, width=columns, height=lines, force_terminal=True)
        self.stream = pyte.Stream(self.screen)
        self.region = LiveRegion(self.console)

    def show(self, lines: list[str], rows: list[str]) -> str:
        self.region.show([Text(line) for line in lines], [Text(row) for row in rows])
        return self.take()

    def take(self) -> str:
        written = self.written.getvalue()
        self.written.seek(0)
        self.written.truncate()
        self.stream.feed(written.replace("\n", "\r\n"))
        return written

    def seen(self) -> list[str]:
        return [line for line in self.screen.text_lines() if line]


def test_what_stays_stays_and_what_goes_goes() -> None:
    window = Window()
    with window.region:
        window.show([], ["waiting"])
        assert window.seen() == ["waiting"] and window.screen.cursor.y == 0
        window.show(["one"], ["two", "status"])
        assert window.seen() == ["one", "two", "status"]
        window.show([], ["status"])
        assert window.seen() == ["one", "status"]
        window.show([str(number) for number in range(10)], ["a", "b", "c"])
    window.take()
    assert window.seen() == ["one", *map(str, range(10))]
    assert window.screen.cursor.hidden is False


def test_a_line_that_is_longer_than_the_window_is_copied_whole() -> None:
    window = Window()
    window.show(["x" * 45, "y" * 20, "z"], ["s" * 30, "t" * 20, "u" * 20])
    assert window.seen() == ["x" * 45, "y" * 20, "z", "s" * 19 + "…", "t" * 20, "u" * 18 + "…"]


@pytest.mark.parametrize("reflow", [True, False])
def test_the_window_may_change_before_the_program_knows(reflow: bool) -> None:
    """A window that gets narrower than half would push rows off the screen that are meant to go."""
    for seed in range(40):
        chance, window, said = random.Random(seed), Window(40, 12, reflow=reflow), 0
        with window.region:
            for _ in range(30):
                columns, lines = chance.choice((30, 40, 50)), chance.choice((10, 12, 20))
                if chance.random() < 0.3:
                    window.screen.resize(lines, columns)
                if chance.random() < 0.7:
                    window.console.size = (window.screen.columns, window.screen.lines)  # type: ignore[assignment]
                lines_now = [f"line {said + n} of what stays" for n in range(chance.choice((0, 0, 1, 3)))]
                said += len(lines_now)
                window.show(lines_now, ["pending " * 4, "s" * 39][: chance.choice((0, 1, 2))])
        window.take()
        assert window.seen() == [f"line {number} of what stays" for number in range(said)], seed


def test_a_window_that_gets_lower_while_its_rows_are_drawn_keeps_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    window, rows = Window(20, 12), [f"row {number}" for number in range(9)]
    window.show(["stays"], rows)
    draw_rows = window.region._draw_rows

    def draw_and_resize(rows: Sequence[Text], width: int) -> str:
        window.screen.resize(4, 20)
        drawn = draw_rows(rows, width)
        window.console.size = (20, 4)  # type: ignore[assignment]
        return drawn

    monkeypatch.setattr(window.region, "_draw_rows", draw_and_resize)
    with window.region:
        window.show([], [*rows, "status"])
    window.take()
    assert window.seen() == ["stays"]


def test_a_frame_is_one_write_and_what_did_not_change_is_not_written() -> None:
    window = Window()
    frame = window.show(["one"], ["two"])
    assert frame.startswith(BEGIN) and frame.endswith(END) and frame.count(BEGIN) == 1
    assert window.show([], ["two"]) == ""


def test_rows_that_are_drawn_again_do_not_vanish_for_a_moment() -> None:
    window = Window()
    window.show([], ["the same words", "status 1"])
    window.region.show([], [Text("the same words and"), Text("status 2")])
    for letter in window.written.getvalue().replace("\n", "\r\n"):
        window.stream.feed(letter)
        assert window.screen.rows()[0].startswith("the same words") and window.screen.rows()[1].startswith("status")


def test_what_is_written_to_stderr_comes_above_in_whole_lines() -> None:
    shown: list[str] = []
    above = AboveRegionWriter(lambda lines: shown.extend(line.plain for line in lines))
    assert above.isatty() and above.write("a warn") == 6 and shown == []
    above.write("ing\n\x1b[1mtwo\x1b[0m\nthr")
    assert shown == ["a warning", "two"]
