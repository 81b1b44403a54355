"""The command line as a whole: its help, its speed, its version."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cortexmlx import __version__
from cortexmlx.cli.start import run

COMMANDS = ["chat", "generate", "batch", "plan", "cache", "models", "doctor", "bench"]


def test_help_names_the_commands_and_gives_examples_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines if line.startswith("  ")]
    assert [word for word in first_words if word in COMMANDS] == COMMANDS
    assert len(lines) <= 30 and max(map(len, lines)) <= 80
    assert sum("cortexmlx " in line for line in lines) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_its_width(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: cortexmlx {command} ") and max(map(len, out.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"cortexmlx {__version__}\n"


@pytest.mark.parametrize("line", ["--help", *(f"{command} --help" for command in COMMANDS), "--version"])
def test_help_does_not_wait_for_mlx(line: str) -> None:
    code = (
        "import sys; from cortexmlx.cli.start import run; run(sys.argv[1:]); "
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'prompt_toolkit', 'rich'}; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, stdin=-3)
    assert done.stdout.splitlines()[-1] == "[]"


def test_completion_of_the_shell_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {
        **os.environ,
        "_CORTEXMLX_COMPLETE": "complete_bash",
        "COMP_WORDS": "cortexmlx ge",
        "COMP_CWORD": "1",
    }
    code = "from cortexmlx.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["generate"]
