"""The command line as a whole: its help, its speed, its version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx import __version__
from cortexmlx.cli.start import run

COMMANDS = ["chat", "generate", "batch", "plan", "cache", "models", "doctor", "bench"]


def test_help_names_the_commands_and_gives_examples_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines if line.startswith("  ")]
    assert [word for word in first_words if word in COMMANDS] == COMMANDS
    assert len(lines) <= 23 and max(map(len, lines)) <= 80, "80x24, with the prompt below it"
    assert sum("cortexmlx " in line for line in lines) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_its_width(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: cortexmlx {command} ") and max(map(len, out.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"cortexmlx {__version__}\n"


def test_help_does_not_wait_for_mlx() -> None:
    lines = ["--help", *(f"{command} --help" for command in COMMANDS), "--version"]
    code = f"""
import sys
from cortexmlx.cli.start import run
for line in {lines}:
    run(line.split())
    heavy = {{"mlx", "mlx_lm", "transformers", "prompt_toolkit", "rich"}} & set(sys.modules)
    print("imported by", line, sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    told = [line for line in done.stdout.splitlines() if line.startswith("imported by")]
    assert told == [f"imported by {line} []" for line in lines]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("cortexmlx ge", ["generate"]),
        ("cortexmlx chat --see", ["--seed"]),
        ("cortexmlx chat sm", ["smollm2"]),
        ("cortexmlx plan o", ["org/one", "org/two"]),
        ("cortexmlx bench --model org/t", ["org/two"]),
    ],
)
def test_the_shell_completes_commands_options_and_models(
    typed: str,
    completed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"models--org--{name}").mkdir()
    monkeypatch.setenv("_CORTEXMLX_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    run([])
    assert capsys.readouterr().out.split() == completed


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "cortexmlx", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cortexmlx {__version__}\n", "")
    done = subprocess.run([sys.executable, "-m", "cortexmlx", "chatt"], capture_output=True, text=True)
    assert done.returncode == 2 and f"Usage: {sys.executable} -m cortexmlx " in done.stderr


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("modles", "Did you mean 'models'?"),
        ("run smollm2", "Did you mean 'chat'? Type: cortexmlx chat smollm2"),
        ("run smollm2 Why?", "Did you mean 'generate'? Type: cortexmlx generate smollm2 'Why?'"),
        ("pull org/model", "a model is downloaded when it is first used: cortexmlx chat org/name"),
        ("rm org/model", "hf cache rm"),
        ("ps", "nothing runs in the background"),
        ("ls", "Did you mean 'models'?"),
        ("smollm2", "cortexmlx chat smollm2"),
        ("org/model-4bit", "cortexmlx chat org/model-4bit"),
        ("generate --promt hi", "--prompt"),
        ("chat --kv-memry 4GB", "--kv-memory"),
    ],
)
def test_what_is_misspelt_or_called_otherwise_elsewhere_is_named(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    assert meant in capsys.readouterr().err.splitlines()[-1]
