"""The pictures in the documentation, of the program itself at work with the starter model: `make pictures`.

`python -m tests.pictures [NAME ...]` makes docs/NAME.svg anew: chat, batch, bench, blocks; all, if none is named. What
is said is seeded and the same at every run; rates and times are those of this machine at this moment. So a picture with
rates is not made on a busy machine (`quiet`), nor kept where its rates are not those of docs/figures.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

from support.cli.terminal import Terminal
from support.pages import ROOT
from tests.pictures.figures import disagreement
from tests.pictures.quiet import busy, look
from tests.pictures.screen import svg

DOCS = ROOT / "docs"
FIGURES = DOCS / "figures.md"
COLUMNS, LINES = 120, 34
PATIENCE_SECONDS = 400.0
SHELL = ("/bin/sh", "-i")
TABLE = (
    "Write this as a Markdown table with the columns Country and Capital: France, Paris; Italy, Rome; Spain, Madrid."
)


class Window(Terminal):
    """A shell in a new folder with a new home, in which `cortexmlx` is this one."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        named = {"HOME": str(folder), "PATH": path, "PS1": "$ ", "ENV": "", "COLORTERM": "truecolor"}
        super().__init__(columns=COLUMNS, lines=LINES, environment=named, program=SHELL, command=(), folder=folder)
        self.wait_for("$ ")

    def run(self, line: str) -> None:
        """Type a command."""
        self.seen = ""
        self.type(line + "\r")

    def until(self, text: str) -> None:
        """Until this stands somewhere on the screen."""
        self.shows(text, PATIENCE_SECONDS)


def chat(folder: Path) -> str:
    """A table, a right answer, and code while it is written, with its status."""
    with Window(folder) as window:
        window.run("cortexmlx chat --temp 0.2 --top-p 0.9 --repetition-penalty 1 --seed 3 --no-kv-store")
        window.until("lists the commands")
        window.until(">>>")
        window.type(f"{TABLE}\r")
        window.until("prompt ")
        window.type("What is the capital of France?\r")
        window.until("is Paris.")
        window.wait_until(lambda: str(window.screen.rows()).count("prompt ") > 1, "two answers", PATIENCE_SECONDS)
        window.type("Write a Python function that returns the square of a number. Only the code.\r")
        window.until("num ** 2")
        window.until("KV ")
        drawn = svg(window.screen, "cortexmlx chat")
        window.type("\x03")  # a chat whose window is closed is still being kept while its folder is removed
        window.until("stopped")
        window.run("/exit")
        window.wait_until(lambda: window.screen.rows()[window.screen.cursor.y] == "$", "the shell", PATIENCE_SECONDS)
        return drawn


def batch(folder: Path) -> str:
    """A batch that is interrupted, and goes on."""
    asked = [{"id": f"q{n}", "prompt": f"What is {n} plus {n}?", "max_tokens": 24} for n in range(1, 101)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    with Window(folder) as window:
        window.run("cortexmlx batch smollm2 questions.jsonl -o answers.jsonl --no-kv-store")
        window.wait_until(lambda: done(window) >= 30, "thirty answers", PATIENCE_SECONDS)
        window.type("\x03")
        window.wait_until(lambda: window.screen.rows()[window.screen.cursor.y] == "$", "the shell", PATIENCE_SECONDS)
        window.run("cortexmlx batch smollm2 questions.jsonl -o answers.jsonl --no-kv-store --resume")
        window.wait_until(lambda: done(window) >= 60, "sixty answers", PATIENCE_SECONDS)
        return svg(window.screen, "cortexmlx batch")


def done(window: Window) -> int:
    """How many answers the line of figures speaks of."""
    found = [row.split("/100 done")[0].split()[-1] for row in window.screen.rows() if "/100 done" in row]
    return int(found[-1]) if found else 0


def bench(folder: Path) -> str:
    """Two block sizes."""
    with Window(folder) as window:
        window.run("clear; cortexmlx bench smollm2 -p 128 -n 32 --block-size 16,32 -r 5")
        window.until("tg32")
        window.wait_until(lambda: window.screen.rows()[window.screen.cursor.y] == "$", "the shell", PATIENCE_SECONDS)
        return svg(window.screen, "cortexmlx bench")


def blocks(folder: Path) -> str:
    """The arena at work."""
    command = [sys.executable, "-m", "tests.pictures.blocks", "smollm2"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


PICTURES: dict[str, Callable[[Path], str]] = {"chat": chat, "batch": batch, "bench": bench, "blocks": blocks}
WITHOUT_RATES = {"blocks"}


def main(names: list[str]) -> int:
    """Make the pictures with these names, or all."""
    if unknown := set(names) - PICTURES.keys():
        print(f"no picture is called {', '.join(sorted(unknown))}: there are {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    for name in names or PICTURES:
        if name not in WITHOUT_RATES and (why := busy(look())):
            return refused(name, why)
        with tempfile.TemporaryDirectory() as folder:
            drawn = PICTURES[name](Path(folder))
        if name not in WITHOUT_RATES and (why := busy(look()) or disagreement(drawn, FIGURES.read_text("utf-8"))):
            return refused(name, why)
        (DOCS / f"{name}.svg").write_text(drawn.rstrip("\n") + "\n", encoding="utf-8")
        print(f"docs/{name}.svg")
    return 0


def refused(name: str, why: str) -> int:
    """Say why a picture stays as it was."""
    print(f"docs/{name}.svg stays as it was: {why}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
