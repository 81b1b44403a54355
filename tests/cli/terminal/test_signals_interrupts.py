"""Ctrl-C is counted: once it stops something, twice within a second it ends the program."""

from __future__ import annotations

import signal
import time

import pytest

from cortexmlx.cli.terminal import signals
from cortexmlx.cli.terminal.signals import counted_interrupts


def test_the_first_stops_what_goes_on_and_elsewhere_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopped: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with counted_interrupts() as presses:
        with presses.calling(lambda: stopped.append("stop")):
            signal.raise_signal(signal.SIGINT)
        assert stopped == ["stop"]
        now[0] += 1.5
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_within_a_second_puts_things_right_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def left(code: int) -> None:
        done.append(f"left {code}")
        raise SystemExit

    monkeypatch.setattr(signals, "leave_now", left)
    with counted_interrupts() as presses, presses.calling(lambda: done.append("stop")):
        presses.at_leave.append(lambda: done.append("restored"))
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGINT)
    assert done == ["stop", "restored", "left 130"]
