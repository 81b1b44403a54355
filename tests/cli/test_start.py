"""How a command starts: the environment for mlx, and the log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from cortexmlx.cli import start


def test_mlx_environment_is_set_by_the_command_line_only_and_gives_way_to_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import os; import cortexmlx.engine; print(os.environ.get('MLX_MAX_MB_PER_BUFFER'))"
    monkeypatch.delenv("MLX_MAX_MB_PER_BUFFER", raising=False)
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "None\n"
    assert start.run(["--version"]) == 0
    assert os.environ["MLX_MAX_MB_PER_BUFFER"] == start.MLX_ENVIRONMENT["MLX_MAX_MB_PER_BUFFER"]
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "7")
    assert start.run(["--version"]) == 0 and os.environ["MLX_MAX_MB_PER_BUFFER"] == "7"


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("COLUMNS", size) for size in ["0", "²", "-5", "abc", "", "9" * 5000]), ("TMPDIR", "/not/there"), ("TMP", "")],
)
def test_a_window_or_temporary_folder_that_is_none_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """rich took "²" for digits, and MLX compiles in the folder: every command ended with an unexpected error."""
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("LINES", "30")
    assert start.run(["models", "--help"]) == 0
    assert name not in os.environ and os.environ["LINES"] == "30"


def test_what_follows_two_dashes_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """`launch claude -- --debug` is Claude Code's option."""
    assert start.run(["launch", "--debug", "--", "--debug"]) == 2
    assert "'--debug' is not one of" in capsys.readouterr().err


def test_a_version_that_cannot_be_written_is_one_message() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for variables in (environment, environment | {"PYTHONUNBUFFERED": "1"}):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "cortexmlx", "--version"]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=variables)
        assert (done.returncode, done.stderr) == (1, "error: stdout cannot be written: No space left on device\n")


def fails_with_a_traceback() -> None:
    try:
        raise ValueError("deep inside")
    except ValueError:
        logging.getLogger("cortexmlx").warning("a step failed", exc_info=True)
    logging.getLogger("cortexmlx").debug("a detail")


def test_a_warning_is_one_line_and_debug_shows_where_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    start.log_to_stderr(debug=False)
    fails_with_a_traceback()
    assert capsys.readouterr() == ("", "cortexmlx: a step failed\n")
    start.log_to_stderr(debug=True)
    fails_with_a_traceback()
    err = capsys.readouterr().err
    assert err.startswith("cortexmlx: a step failed\nTraceback") and "ValueError: deep inside" in err
    assert err.endswith("cortexmlx: a detail\n")
