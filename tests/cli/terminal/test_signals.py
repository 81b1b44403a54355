"""Ctrl-C is counted: once it stops something, twice within a second it ends the program."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from cortexmlx.cli.terminal import signals
from cortexmlx.cli.terminal.signals import handle_signals
from support.cli import cli_fakes
from support.cli.terminal import STOP, Terminal, pieces


def test_the_first_stops_what_goes_on_and_elsewhere_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopped: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with handle_signals() as presses:
        with presses.call_on_interrupt(lambda: stopped.append("stop")):
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

    monkeypatch.setattr(signals, "exit_immediately", left)
    with handle_signals() as presses, presses.call_on_interrupt(lambda: done.append("stop")):
        presses.at_leave.append(lambda: done.append("decode_record"))
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGINT)
    assert done == ["stop", "decode_record", "left 130"]


CHAT = shlex.join([sys.executable, cli_fakes.__file__, "chat", "fake", "--no-save"])
SHELLS = [("/bin/bash", "--norc", "-i"), pytest.param(("/bin/dash", "-i"), marks=pytest.mark.slow)]


class Shell(Terminal):
    """A shell in the terminal."""

    def __init__(self, line: tuple[str, ...]) -> None:
        named = {"PS1": "sh-$ ", "ENV": "", "BASH_SILENCE_DEPRECATION_WARNING": "1"}
        super().__init__(program=line, command=(), environment=named)
        self.wait_for_shell()

    def wait_for_shell(self) -> None:
        self.wait_until(lambda: self.screen.rows()[self.screen.cursor.y] == "sh-$", "the shell's prompt")

    def modes(self) -> str:
        """What stty says."""
        said = self._folder / "modes"
        self.type(f"stty -a > {said}; echo done\r")
        self.wait_for("\ndone")
        self.wait_for_shell()
        return said.read_text()


@pytest.fixture(params=SHELLS, ids=["bash", "dash"])
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    if not os.access(request.param[0], os.X_OK):
        pytest.skip(f"there is no {request.param[0]}")
    with Shell(request.param) as opened:
        yield opened


def test_an_answer_is_stopped_and_goes_on_and_the_shell_has_its_terminal_meanwhile(shell: Shell) -> None:
    before = shell.modes()
    shell.type(f"{CHAT}\r")
    shell.wait_for_prompt()
    shell.ask([*pieces("The sky is blue.\n\nIt sca"), STOP, *pieces("tters light."), STOP, " So."])
    shell.wait_for_stop()
    shell.shows("It sca")
    shell.shows("TTFT")
    shell.type("\x1a")
    shell.wait_for("topped")
    shell.wait_for_shell()
    assert not shell.screen.cursor.hidden
    assert not any("TTFT" in row or "It sca" in row for row in shell.screen.rows()), "what was not final is gone"
    assert any("The sky is blue." in row for row in shell.screen.rows())
    assert shell.modes() == before
    paste = shell.raw.rpartition(b"topped")[0]
    assert paste.rfind(b"\x1b[?2004l") > paste.rfind(b"\x1b[?2004h"), "no marks around what is pasted"
    shell.type("fg\r")
    shell.shows("It sca")
    shell.shows("TTFT")
    assert shell.screen.cursor.hidden
    shell.type("ab")
    shell.go_on()
    shell.wait_for_stop()
    shell.go_on()
    shell.wait_until(lambda: ">>> ab" in shell.screen.rows(), "what was typed meanwhile")
    said = "\n".join(shell.lines())
    assert said.count("It scatters light. So.") == 1 and said.count("TTFT") == 1, "the figures of its end"
    shell.type("\x15/bye\r")
    shell.wait_for_shell()
    assert shell.modes() == before


@pytest.mark.slow
def test_where_no_shell_could_bring_it_back_it_goes_on() -> None:
    with Terminal("--no-save") as terminal:
        terminal.wait_for_prompt()
        terminal.ask(["The sky", STOP, " is blue."])
        terminal.wait_for_stop()
        terminal.type("\x1a")
        terminal.go_on()
        terminal.wait_for_prompt()
        assert terminal.answer() == ["The sky is blue."]


@pytest.mark.slow
def test_in_the_background_it_waits_and_at_its_prompt_ctrl_z_stops_it_too(shell: Shell) -> None:
    before = shell.modes()
    shell.type(f"{CHAT}\r")
    shell.wait_for_prompt()
    shell.type("half")
    shell.shows(">>> half")
    shell.type("\x1a")
    shell.wait_for_shell()
    assert shell.modes() == before
    shell.type("fg\r")
    shell.shows(">>> half")
    shell.type("\x15")
    shell.wait_for_prompt()
    shell.ask([*pieces("The sky"), STOP, " is blue."])
    shell.wait_for_stop()
    shell.shows("TTFT")
    shell.type("\x1a")
    shell.wait_for_shell()
    shell.type("bg\r")
    shell.wait_for("bg")
    shell.wait_for_shell()
    assert shell.modes() == before, "it is stopped again, and has drawn nothing"
    assert not any("TTFT" in row for row in shell.screen.rows())
    shell.type("fg\r")
    shell.shows("TTFT")
    shell.go_on()
    shell.wait_for_prompt()
    assert "The sky is blue." in shell.lines()
    shell.type("/bye\r")
    shell.wait_for_shell()
    assert shell.modes() == before


@pytest.mark.slow
def test_with_a_question_from_a_pipe_the_shell_gets_pastes_without_marks(shell: Shell) -> None:
    shell.type(f"echo '!slow' | {CHAT}\r")
    shell.shows("word3")
    shell.type("\x1a")
    shell.wait_for("topped")
    shell.wait_for_shell()
    shell.seen = ""
    before = len(shell.raw)
    shell.type("fg\r")
    shell.shows("word20")
    shell.type("\x03")
    shell.wait_for_shell()
    assert shell.raw[before:].rpartition(b"word20")[0].count(b"\x1b[?2004h") == 0
