"""How far a model is on its way: one bar that moves for a person, a line now and then for a log."""

from __future__ import annotations

import io
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from rich import progress as rich

from cortexmlx.cli.terminal import progress as module
from cortexmlx.cli.terminal.progress import PrefillProgress, loading_progress, prefill_text, progress_numbers
from cortexmlx.types.progress import Progress
from cortexmlx.types.request import TokenEvent
from support.cli.chat_commands import TerminalText
from support.cli.terminal import Terminal
from support.models.hub import large_model, serving
from support.patience import soon

MIB = 2**20


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
    assert progress_numbers(news) == says


def on_screen(written: str) -> str:
    """What stands in the terminal's one line after all that was written: colours dropped, overwritten text gone."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return plain.rstrip("\r\n").rpartition("\r")[2]


@pytest.mark.parametrize("width", [80, 40])
def test_a_download_is_one_line_that_moves(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stderr", screen := TerminalText())
    with loading_progress("org/" + "long-" * 10 + "name") as show:
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
    monkeypatch.setattr(sys, "stderr", screen := TerminalText())
    with pytest.raises(KeyboardInterrupt), loading_progress("org/model"):
        pytest.fail("it goes on")
    assert begun and not begun[0].live.is_started
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K"), "its row is gone"


def test_the_bar_says_bytes_rate_and_time_left_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", screen := TerminalText())
    with loading_progress("mlx-community/A-Model-With-A-Name-8B-4bit") as show:
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
    with loading_progress("org/model") as show:
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
    with pytest.raises(KeyboardInterrupt), loading_progress("org/model") as show:
        show(Progress("downloading", 0, 0))
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt), loading_progress("org/model") as show:
        show(Progress("downloading", 3 * MIB, 10 * MIB))
        raise KeyboardInterrupt
    assert capsys.readouterr().err.splitlines()[-1] == (
        "cortexmlx: stopped; 3 of 10 MiB are kept: run the same command to continue"
    )


JOINED = """if True:
    import logging, threading
    from cortexmlx.cli import start
    from cortexmlx.cli.terminal import console, progress
    from rich.live import Live

    def stop_while_others_print(live, disable=Live._disable_redirect_io):
        disable(live)
        for tell in (console.print_note, logging.warning):
            other = threading.Thread(target=tell, args=["told"])
            other.start()
            other.join(0.2)  # it prints, or waits for the end of the bar

    Live._disable_redirect_io = stop_while_others_print
    start.log_to_stderr(False)
    with progress.loading_progress("org/model") as show:
        show(progress.Progress("downloading", 1 << 20, 1 << 21))
"""


def test_a_line_of_another_thread_does_not_join_a_bar_that_is_removed() -> None:
    with Terminal(program=(sys.executable, "-c", JOINED), command=()) as terminal:
        assert terminal.exit_code() == 0
        assert {line for line in terminal.lines() if line.strip()} == {"cortexmlx: told", "root: told"}


PROGRAM = (sys.executable, "-m", "cortexmlx")


@pytest.mark.parametrize(
    ("columns", "lines", "moving"),
    [
        (80, 24, r" of 5.72 MiB · "),
        pytest.param(40, 10, "%", marks=pytest.mark.slow),
        pytest.param(200, 50, " of 5.72 MiB · ", marks=pytest.mark.slow),
    ],
)
def test_a_download_is_one_line_that_moves_until_ctrl_c(columns: int, lines: int, moving: str, tmp_path: Path) -> None:
    """On the real engine, which gets no farther than the download."""
    command = ("generate", "org/tiny", "-p", "hi")
    with serving(tiny=large_model(tmp_path / "tiny", (6_000_000,))) as hub:
        hub.bytes_per_second = 2e5
        there = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        with Terminal(columns=columns, lines=lines, environment=there, command=command, program=PROGRAM) as terminal:
            terminal.shows(moving)
            seen: set[str] = set()
            while len(seen) <= 4:
                terminal.wait_until(lambda: True, "anything")
                drawn = [line for line in terminal.lines() if line.strip()]
                assert len(drawn) <= 1, "one line, and nothing above it"
                seen |= {*drawn}
                time.sleep(0.05)
            assert all(line.startswith("downloading org/tiny") for line in seen)
            assert columns < 64 or any("KiB/s · " in line and line.rstrip().endswith(" left") for line in seen)
            terminal.type("\x03")
            assert terminal.exit_code() == 130
            said = " ".join(line.strip() for line in terminal.lines() if line.strip())
            assert "downloading" not in said and said.endswith("are kept: run the same command to continue")
        (kept,) = (tmp_path / "home").glob("hub/*/blobs/*.incomplete")
        assert 0 < kept.stat().st_size < 6_000_000


CHUNK = TokenEvent("", progress=Progress("prefilling", 1024, 4096, cached=512))


def test_it_says_what_is_done_and_what_was_there() -> None:
    assert prefill_text(Progress("prefilling", 0, 4096)) == "reading 0 of 4,096 tokens"
    assert CHUNK.progress is not None and prefill_text(CHUNK.progress) == "reading 1,024 of 4,096 tokens, 512 cached"


def test_elsewhere_than_on_a_terminal_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with PrefillProgress() as reading:
        reading.update(CHUNK)
        reading.show_stopping()
        reading.update(TokenEvent("a", 1))
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
