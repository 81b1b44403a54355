"""What is running: a live line in a terminal, now and then a line in a log."""

from __future__ import annotations

import pytest

from cortexmlx.cli.bench import progress


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.shown() as show:
        for now[0] in (0.0, 5.0, 10.0, 12.0, 25.0):
            show(f"at {now[0]:.0f}")
    assert capsys.readouterr().err.splitlines() == ["cortexmlx: at 10", "cortexmlx: at 25"]


def test_a_terminal_gets_every_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress.console, "is_terminal", lambda stream: True)
    with progress.shown() as show:
        assert getattr(show, "__name__", "") == "update"
    assert capsys.readouterr().out == ""
