"""Every command in a real terminal, on hostile answers, names, paths, records and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli.hostile import HOSTILE, offences
from support.cli.terminal import Terminal, pieces
from support.folders import CONFIG

ALL = " ".join(HOSTILE)
NAME = "".join(HOSTILE[:12]).replace("/", "")[:80] + "\u202e[red]\nFORGED"
FIGURES = "TTFT 12 ms"
QUICK = (0, 2, 10, 18)
"""Commands of the fast suite: an answer, thoughts, records, wrong usage."""


def ended(*command: str, environment: dict[str, str] | None = None) -> bytes:
    """What the terminal got of a whole command."""
    with Terminal(command=command, environment=environment) as terminal:
        terminal.exit_code()
        return terminal.raw


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder whose name, type and settings are hostile."""
    path = tmp_path / NAME
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "architectures": [ALL], "model_type": ALL}))
    return path


def commands(folder: Path) -> Iterator[list[str]]:
    requests = folder.parent / f"in {NAME}.jsonl"
    requests.write_text(
        "".join(json.dumps({"id": each, "prompt": f"!say {each}"}) + "\n" for each in HOSTILE)
        + json.dumps({"id": "bad", ALL: 1})
        + f"\n{ALL}\n"
    )
    yield ["generate", str(folder), "-p", f"!say {ALL}"]
    yield ["generate", "fake", "--json", "-p", f"!say {ALL}"]
    yield ["generate", "fake", "-v", "--system", ALL, "-p", f"!say <think>{ALL}</think>{ALL}"]
    yield ["generate", "fake", "--n", "2", "-p", f"!say {ALL}"]
    yield ["generate", f"missing{NAME}", "-p", "x"]
    yield ["generate", f"broken{NAME}", "-p", "x", "--debug"]
    yield ["generate", "fake", "-p", "x", "--temp", ALL]
    yield ["generate", "fake", "-p", "x", f"--{ALL}"]
    yield ["chat", f"missing{NAME}"]
    yield ["chat", "--resume", ALL]
    yield ["batch", str(folder), str(requests)]
    yield ["batch", "fake", str(requests), "-o", str(folder / NAME)]
    yield ["batch", "fake", str(folder / f"none {NAME}")]
    yield ["eval", "fake", str(folder / f"none {NAME}")]
    yield ["plan", str(folder)]
    yield ["plan", f"{folder}{NAME}"]
    yield ["cache", "--kv-store", str(folder)]
    yield ["bench", str(folder), "--suite", "basic", "-p", "8", "-n", "2", "-r", "1"]
    yield [ALL]
    yield ["pull", ALL]


@pytest.mark.parametrize("number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(20)])
def test_a_command_writes_no_sequence_but_its_own(number: int, folder: Path) -> None:
    line = [*commands(folder)][number]
    raw = ended(*line)
    assert raw and offences(raw) == [], (line[0], raw)


def test_the_models_of_the_hubs_cache_have_names_in_one_line(tmp_path: Path) -> None:
    snapshot = tmp_path / f"models--org--{NAME}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    raw = ended("models", environment={"HF_HUB_CACHE": str(tmp_path)})
    assert offences(raw) == []


def test_a_chat_writes_no_sequence_but_its_own(tmp_path: Path) -> None:
    for number, each in enumerate(HOSTILE):
        (tmp_path / f"tab{number}{each.replace('/', '')}").write_text(ALL)
    (tmp_path / "notes.txt").write_text(ALL)
    with Terminal("--no-history", "--system", ALL, folder=tmp_path) as terminal:
        for text in (
            ALL,
            f"```python\n{ALL}\n```\n| a | b |\n|---|---|\n| {HOSTILE[0]} | {HOSTILE[3]} |\n\n# {ALL}\n\n[a](http://{HOSTILE[1]})\n",
        ):
            terminal.wait_for_prompt()
            terminal.ask(pieces(f"<think>{text}</think>{text}"))
            terminal.wait_for(FIGURES)
        for line in (
            "/show",
            "/show messages",
            "/thoughts",
            f"/load {NAME[:60]}x",
            "/model no\x16\x1b[2Jne",
            "@notes.txt !say x",
            "/file tab\t\t",
            "/edit",
        ):
            terminal.wait_for_prompt()
            terminal.type(f"{line}\r".replace("\n", " "))
        terminal.type("\x15")
        terminal.wait_for_prompt()
        for text in HOSTILE:
            terminal.paste(text)
        terminal.enter("", FIGURES)
        terminal.type("/bye\r")
        terminal.exit_code()
        assert offences(terminal.raw) == []
