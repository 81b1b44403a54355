"""What is drawn while an answer is written: when something is new, and now and then, but never beyond its share."""

from __future__ import annotations

import io
import sys
import threading
import time
from contextlib import AbstractContextManager, contextmanager

import pyte
import pytest
from rich.console import Console
from rich.text import Text

from cortexmlx.cli.terminal import drawing
from cortexmlx.cli.terminal.drawing import LiveDrawing
from support.cli.emulator import Emulator
from support.patience import PATIENCE


class Shown:
    """What a drawing with a counter below it has left on a screen; `stay` goes above that."""

    def __init__(self) -> None:
        self.written, self.drawn = io.StringIO(), 0
        self.stay: list[Text] = []
        self.console = Console(file=self.written, width=40, height=10, force_terminal=True)
        self.drawing = LiveDrawing(self.console, self.draw, self.below)

    def draw(self) -> tuple[list[Text], list[Text]]:
        self.drawn += 1
        stay, self.stay = self.stay, []
        return stay, self.below()

    def below(self) -> list[Text]:
        return [Text(f"drawn {self.drawn}")]

    def lines(self) -> list[str]:
        screen = Emulator(40, 10)
        pyte.Stream(screen).feed(self.written.getvalue().replace("\n", "\r\n"))
        return [line for line in screen.text_lines() if line]


def test_it_is_drawn_when_something_has_changed_and_by_itself_and_goes() -> None:
    shown = Shown()
    with shown.drawing:
        shown.stay = [Text("stays")]
        shown.drawing.request_redraw()
        assert shown.lines() == ["stays", "drawn 1"]
        until = time.monotonic() + PATIENCE
        while shown.drawn < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert shown.drawn >= 3 and shown.lines() == ["stays"]


def test_drawing_takes_its_share_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = Shown()
    draw = shown.drawing._draw

    def slow() -> object:
        now[0] += 0.002
        return draw()

    monkeypatch.setattr(shown.drawing, "_draw", slow)
    for _ in range(1000):
        now[0] += 0.001
        shown.drawing.request_redraw()
    assert 1000 / 123 <= shown.drawn <= 1000 / 119 + 1


def test_what_others_say_comes_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "is_terminal", lambda stream: True)
    shown = Shown()
    with shown.drawing:
        print("a warning", file=sys.stderr)
        assert shown.lines() == ["a warning", "drawn 0"]


def test_who_stops_the_program_waits_for_the_lock_while_it_is_drawn() -> None:
    held: list[AbstractContextManager[object]] = []

    @contextmanager
    def away(lock: AbstractContextManager[object]):  # type: ignore[no-untyped-def]
        held.append(lock)
        yield
        held.remove(lock)

    shown = Shown()
    shown.drawing._suspension_guard = away
    with shown.drawing, held[0]:
        waiting = threading.Thread(target=shown.drawing.request_redraw)
        waiting.start()
        waiting.join(0.05)
        assert shown.drawn == 0 and waiting.is_alive()
    assert not held
