"""The cost of drawing an answer: `python -m cortexmlx.bench.studies.commands.redraw`, 40 seconds for each kind of
answer.

A text of 16,000 characters arrives in pieces of four, a hundred per second, as from a model. The cost is the processor
time of the process, minus that of the same loop without a view. It is given as a share of the time in which the model
decodes.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from rich.console import Console

from cortexmlx.cli.chat.status import Status
from cortexmlx.cli.chat.view import MarkdownView
from cortexmlx.progress import Progress
from cortexmlx.request import TokenEvent

LENGTH, PIECE, RATE = 16_000, 4, 100.0
PROSE = "The **sky** is blue because the *molecules* of the air scatter `short` waves more than long ones, and so on. "
CODE = "    for wavelength in range(380, 700):  # in nanometres\n        print(f'{wavelength}: {1 / wavelength**4}')\n"
ROW = "| violet | 400 nm | scattered **most** of all, but the sun sends little of it |\n"
KINDS = {
    "an answer of all kinds": f"## Why\n\n{PROSE * 3}\n\n- {PROSE}\n- {PROSE}\n\n```python\n{CODE * 3}```\n\n"
    f"| a | b | c |\n|---|---|---|\n{ROW * 3}\n1. {PROSE}\n   - {PROSE}\n\n> {PROSE}\n\n",
    "paragraphs": PROSE * 5 + "\n\n",
    "one paragraph": PROSE,
    "one word": "a",
    "one word with signs": "a_b_",
    "signs without an end": "*so `it [is ~~and _not <that &c ",
    "one quote": f"> {PROSE}\n",
    "one block of code": CODE,
    "one table": ROW,
}
BEGINNING = {"one block of code": "```python\n", "one table": "| a | b | c |\n|---|---|---|\n"}


@dataclass(frozen=True)
class Prompt:
    """A stand-in for the prompt: what the figures below an answer show of it."""

    prompt: range = range(100)
    progress: Progress | None = None
    cancelling: bool = False


def text_of(kind: str, length: int = LENGTH) -> str:
    """Return `length` characters of an answer."""
    begun, again = BEGINNING.get(kind, ""), KINDS[kind]
    return (begun + again * (length // len(again) + 1))[:length]


def pieces(text: str, rate: float) -> Iterator[str]:
    """Yield the text in pieces, `rate` per second."""
    begun = time.monotonic()
    for number, at in enumerate(range(0, len(text), PIECE), 1):
        time.sleep(max(begun + number / rate - time.monotonic(), 0))
        yield text[at : at + PIECE]


def cost(text: str, rate: float = RATE) -> tuple[float, int]:
    """Return the seconds of processor time that drawing `text` takes, and the number of characters sent to the
    terminal.
    """
    written = io.StringIO()
    console = Console(file=written, width=80, height=24, force_terminal=True, color_system="256")
    spent = []
    for drawn in (False, True):
        begun = time.process_time()
        view = MarkdownView(console, Status(Prompt(), 8192), thinking=False) if drawn else None
        with view or nullcontext():
            for piece in pieces(text, rate):
                if view is not None:
                    view.note(TokenEvent(piece, 1))
                    view.feed(piece)
        spent.append(time.process_time() - begun)
    return spent[1] - spent[0], len(written.getvalue())


def table(length: int = LENGTH, rate: float = RATE) -> str:
    """Return the costs of all kinds as text."""
    seconds = length / PIECE / rate
    lines = [f"{length:,} characters at {rate:.0f} tokens/s ({seconds:.0f} s), 80 x 24", f"{'':<24}drawing  written"]
    for kind in KINDS:
        spent, written = cost(text_of(kind, length), rate)
        lines.append(f"{kind:<24}{spent / seconds:>7.2%}  {written / 1000:,.0f} KB")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
