"""What the fake engine answers to the verbs in a prompt: see `cli_fakes`."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from cortexmlx.types.messages import ChatPrompt
from cortexmlx.types.progress import OnProgress, Progress

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]] | ChatPrompt


def text_of(prompt: Prompt) -> str:
    """What the user said last."""
    if isinstance(prompt, str):
        return prompt
    prompt = prompt.messages if isinstance(prompt, ChatPrompt) else prompt
    if prompt and isinstance(prompt[-1], Mapping):
        return str(prompt[-1]["content"])
    text = "".join(map(chr, prompt))  # type: ignore[arg-type]
    last = text.rpartition("<user>")[2]
    if "\n<tool>" in last and getattr(prompt, "calls", None) is not None:
        result = last.rpartition("\n<tool>")[2].partition("\n<assistant>")[0]
        return result if result.startswith("!") else f"!say The result is {result}"
    return last.partition("\n<assistant>")[0]


def answer_to(text: str) -> list[str]:
    """The answer in pieces whose concatenation it is."""
    if "!call " in text:
        calls = [each.strip().split(" ", 1) for each in text.split("!call ")[1:]]
        said = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
        )
    elif "!say " in text:
        said = text.split("!say ", 1)[1]
    elif "!read" in text:
        said = "That was long."
    elif "!long" in text or "!slow" in text:
        said = " ".join(f"word{i}" for i in range(200))
    else:
        said = f"You said: {text}"
    pieces = said.split(" ")
    return [pieces[0], *(" " + piece for piece in pieces[1:])]


def scripted() -> list[str | None]:
    """The pieces that a test has written down; None for a stop."""
    steps: list[str | None] = json.loads(Path(os.environ["FAKE_SCRIPT"]).read_text())
    return steps


def take_long(what: Literal["downloading", "loading"], on_progress: OnProgress | None) -> None:
    """Report progress for ever. It never comes farther than a hundredth."""
    for piece in itertools.count():
        if on_progress is not None:
            on_progress(Progress(what, min(piece, 6) << 20, 600 << 20))
        time.sleep(0.05)
