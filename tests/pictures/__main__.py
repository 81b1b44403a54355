"""The pictures in the documentation, of the program itself at work with the starter model: `make pictures`.

`python -m tests.pictures [NAME ...]` makes docs/NAME.svg anew: chat, batch, bench, blocks; all, if none is named. What
is said is seeded and the same at every run; rates and times are those of this machine at this moment.
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

from support.terminal import Terminal
from tests.pictures.screen import svg

DOCS = Path(__file__).resolve().parents[2] / "docs"
COLUMNS, LINES = 92, 34
PATIENCE_SECONDS = 400.0
SHELL = ("/bin/sh", "-i")


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
    """A question and its answer, and a second one while it is written, with its status."""
    with Window(folder) as window:
        window.run("cortexmlx chat --seed 3 --no-kv-store")
        window.until("lists the commands")
        window.until(">>>")
        window.type("Give me three tips for watering tomatoes, as a short list.\r")
        window.until("prompt ")
        window.until(" tokens · ")
        window.type("Why is the sky blue?\r")
        window.until("scatter")
        window.until("KV ")
        return svg(window.screen, "cortexmlx chat")


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
        window.run("clear; cortexmlx bench smollm2 -p 128 -n 32 --block-size 16,32 -r 2")
        window.until("tg32")
        window.wait_until(lambda: window.screen.rows()[window.screen.cursor.y] == "$", "the shell", PATIENCE_SECONDS)
        return svg(window.screen, "cortexmlx bench")


def blocks(folder: Path) -> str:
    """The arena at work."""
    command = [sys.executable, "-m", "cortexmlx.cli.terminal.picture", "smollm2"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


PICTURES: dict[str, Callable[[Path], str]] = {"chat": chat, "batch": batch, "bench": bench, "blocks": blocks}


def main(names: list[str]) -> int:
    """Make the pictures with these names, or all."""
    if unknown := set(names) - PICTURES.keys():
        print(f"no picture is called {', '.join(sorted(unknown))}: there are {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            drawn = PICTURES[name](Path(folder))
        (DOCS / f"{name}.svg").write_text(drawn.rstrip("\n") + "\n", encoding="utf-8")
        print(f"docs/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
