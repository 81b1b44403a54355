"""How a command ends: errors, Ctrl-C and readers that go away become exit codes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cortexmlx.cli.start import run
from cortexmlx.cli.terminal.exits import exit_codes
from support.cli import cli_fakes
from support.cli.cli_fakes import Fakes
from support.patience import PATIENCE

FAKE_COMMAND = [sys.executable, cli_fakes.__file__]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "generate missing -p hi",
            "error: no model 'missing': no such folder or .gguf file, and not a hub id (org/name).\n",
        ),
        (
            "generate fake -p !fail",
            "error: prompt has 9120 tokens, the cache holds 8192: raise --kv-memory or shorten it\n",
        ),
        (
            "generate broken -p hi",
            "error: unexpected RuntimeError: a bug. Run it again with --debug for the traceback.\n",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    line: str, says: str, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 1
    assert capsys.readouterr().err == says


def test_a_folder_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(typer.Exit), exit_codes(debug=False):
        os.getcwd()
    assert capsys.readouterr().err == "error: the folder in which this shell is was deleted: cd to another one\n"


def test_debug_anywhere_on_the_line_shows_the_traceback(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "missing", "-p", "hi", "--debug"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "ModelNotFound" in err


def test_ctrl_c_keeps_the_text_so_far_and_exits_130() -> None:
    process = subprocess.Popen([*FAKE_COMMAND, "generate", "fake", "-p", "!slow"], stdout=-1, stderr=-1, stdin=-3)
    assert process.stdout is not None
    start = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (start, process.returncode, err) == (b"word0", 130, b"")
    assert out.startswith(b" word1") or out == b"\n"


@pytest.mark.parametrize("closed", [pytest.param("2>&- <&-", marks=pytest.mark.slow), ">&- 2>&- <&-", "2>/dev/full"])
def test_what_is_closed_or_full_is_no_error(closed: str) -> None:
    words = [*FAKE_COMMAND, "generate", "fake", "-p", "!say <think>let me see</think>It is."]
    done = subprocess.run(["sh", "-c", f"{shlex.join(words)} {closed}"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"" if closed.startswith(">&-") else b"It is.\n")


def test_an_interrupt_before_there_is_a_command_has_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "cortexmlx.cli.app", Interrupting())
    assert run(["--version"]) == 130


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen([*FAKE_COMMAND, "generate", "fake", "-p", "!slow"], stdout=-1, stderr=-1, stdin=-3)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 141
    assert process.stderr.read() == b""


@pytest.mark.parametrize("words", [["--help"], pytest.param(["chats", "--path"], marks=pytest.mark.slow)])
def test_a_reader_that_has_gone_before_is_none_either(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as gone:
        process = subprocess.run([*FAKE_COMMAND, *words], stdout=gone, stderr=-1, check=False)
    assert (process.returncode, process.stderr) == (141, b"")
