"""How far a model is on its way: one bar that moves for a person, a line now and then for a log."""

from __future__ import annotations

import io
import re
import signal
import sys

import pytest
from rich import progress as rich

from cortexmlx.cli.terminal import progress as module
from cortexmlx.cli.terminal.progress import loading, numbers
from cortexmlx.types.progress import Progress
from support.patience import soon

MIB = 2**20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("news", "says"),
    [
        (Progress("downloading", 0, 0), "asking the hub"),
        (Progress("downloading", 3 * MIB, 10 * MIB), "3 of 10 MiB"),
        (Progress("downloading", 512 * MIB, 4096 * MIB, 0, 32.0 * MIB), "512 MiB of 4 GiB · 32 MiB/s · 1:52 left"),
        (Progress("downloading", 0, 8192 * MIB, 0, MIB / 4), "0 B of 8 GiB · 256 KiB/s · 9:06:08 left"),
        (Progress("loading", 1, 4), "25%"),
        (Progress("compiling", 1, 3), "1 of 3 kernels"),
    ],
)
def test_the_figures_of_progress(news: Progress, says: str) -> None:
    assert numbers(news) == says


def on_screen(written: str) -> str:
    """What stands in the terminal's one line after all that was written: colours dropped, overwritten text gone."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return plain.rstrip("\r\n").rpartition("\r")[2]


@pytest.mark.parametrize("width", [80, 40])
def test_a_download_is_one_line_that_moves(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with loading("org/" + "long-" * 10 + "name") as show:
        for done in (0, 100, 200):
            show(Progress("downloading", done * MIB, 400 * MIB, 0, 50.0 * MIB))
            sys.stderr.flush()
    drawn = screen.getvalue().partition("\x1b[?25h")[0]
    assert drawn.count("\r") >= 2 and "\n" not in drawn.rstrip("\n"), "it goes back to the line's beginning"
    assert len(on_screen(drawn)) <= width


def test_ctrl_c_while_the_bar_begins_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was drawn for ever, over the prompt of a chat that had given a model up."""

    def start(bar: rich.Progress) -> None:
        usual(bar)
        signal.raise_signal(signal.SIGINT)
        begun.append(bar)

    usual, begun = rich.Progress.start, list[rich.Progress]()
    monkeypatch.setattr(rich.Progress, "start", start)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with pytest.raises(KeyboardInterrupt), loading("org/model"):
        pytest.fail("it goes on")
    assert begun and not begun[0].live.is_started
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K"), "its row is gone"


def test_the_bar_says_bytes_rate_and_time_left_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with loading("mlx-community/A-Model-With-A-Name-8B-4bit") as show:
        show(Progress("downloading", 1200 * MIB, 4500 * MIB, 0, 35.0 * MIB))
        assert soon(lambda: " left" in on_screen(screen.getvalue())), "the bar draws itself"
        line = on_screen(screen.getvalue())
    assert line.startswith("downloading …") and "8B-4bit" in line and len(line) <= 80
    assert line.rstrip().endswith("1.17 of 4.39 GiB · 35 MiB/s · 1:34 left")


def test_a_pipe_gets_a_line_at_once_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with loading("org/model") as show:
        for second in range(25):
            clock[0] = float(second)
            show(Progress("downloading", second * MIB, 100 * MIB, 0, float(MIB)))
        show(Progress("loading", 1, 3))
    assert capsys.readouterr().err.splitlines() == [
        "cortexmlx: downloading org/model: 0 B of 100 MiB · 1 MiB/s · 1:40 left",
        "cortexmlx: downloading org/model: 10 of 100 MiB · 1 MiB/s · 1:30 left",
        "cortexmlx: downloading org/model: 20 of 100 MiB · 1 MiB/s · 1:20 left",
    ]


def test_an_interrupted_download_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), loading("org/model") as show:
        show(Progress("downloading", 0, 0))
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt), loading("org/model") as show:
        show(Progress("downloading", 3 * MIB, 10 * MIB))
        raise KeyboardInterrupt
    assert capsys.readouterr().err.splitlines()[-1] == (
        "cortexmlx: stopped; 3 of 10 MiB are kept: run the same command to continue"
    )
