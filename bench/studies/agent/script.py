"""The acts of an agent in some turns, as data from a seed. It reads outputs of tools, asks side questions in forks,
cuts old outputs short, and cancels answers. The program is killed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from cortexmlx.bench.measure.prompts import Prompts

TURNS = 20
OUTPUT = (50, 1_500)
"""The shortest and the longest output of a tool, in tokens. Lengths are log-uniform."""
ANSWER = 32

_FORKED = (0.25, 0.55, 0.8)
_EDITED = (0.45, 0.7)
_CANCELLED = (0.3, 0.65)
_KILLED = (0.5, 0.9)
"""After these fractions of the turns there are two forks, an edit, a cancelled answer, a kill."""

SAMPLE = (
    "the file has lines with errors in function main return value of index table row key open close read write test "
    "passed failed warning at path src lib build cache size bytes time user name data list map set type int string"
)
_WORDS = SAMPLE.split()


class Kind(str, Enum):
    """The kinds of acts."""

    ASK = "ask"
    FORK = "fork"
    EDIT = "edit"
    CANCEL = "cancel"
    KILL = "kill"


@dataclass(frozen=True)
class Act:
    """One act."""

    kind: Kind
    tokens: int = 0
    """About how many tokens its text has."""
    answer: int = ANSWER
    """Tokens of the answer. CANCEL stops after half of them."""
    place: int = 0
    """The message that EDIT replaces."""
    seed: int = 0


def make_script(
    seed: int, turns: int = TURNS, output: tuple[int, int] = OUTPUT, answer: int = ANSWER, kills: bool = True
) -> list[Act]:
    """Return the acts of `turns` turns."""
    random = np.random.default_rng(seed)
    lengths = Prompts(2, seed).lengths(turns, *output)

    def after(parts: tuple[float, ...]) -> set[int]:
        return {round(part * turns) for part in parts}

    acts: list[Act] = []
    killed = 0  # left out of the seeds, so that the texts are the same without kills

    def add(kind: Kind, tokens: int, place: int = 0) -> None:
        acts.append(Act(kind, tokens, answer, place, seed=1000 * seed + len(acts) - killed))

    for turn, length in enumerate(lengths, 1):
        add(Kind.ASK, length)
        for _ in range(2 * (turn in after(_FORKED))):
            add(Kind.FORK, output[0])
        if turn in after(_CANCELLED):
            add(Kind.CANCEL, output[0])
        if turn in after(_EDITED):
            add(Kind.EDIT, output[0], place=2 * int(random.integers(turn // 2, turn)))
        if kills and turn in after(_KILLED):
            add(Kind.KILL, 0)
            killed += 1
        if turn in after(_KILLED):  # short: its first token times the conversation, not a long output
            add(Kind.ASK, output[0])
    return acts


def text(act: Act, tokens_per_word: float) -> str:
    """Return what a tool says: words and numbers, with about as many tokens as the act has."""
    random = np.random.default_rng(act.seed)
    count = max(1, round(act.tokens / tokens_per_word))
    words = [_WORDS[i] for i in random.integers(0, len(_WORDS), count)]
    return " ".join(words)


def tokens_per_word(tokenized: int) -> float:
    """Return the tokens per word for `text`, from the number of tokens of `SAMPLE`."""
    return max(1.0, tokenized / len(_WORDS))
