"""What an agent does in some turns, as data that a seed makes: outputs of tools are read, side questions asked in
forks, old outputs cut short, answers cancelled, and the program is killed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from cortexmlx.bench.measure.prompts import Prompts

TURNS = 20
OUTPUT = (50, 1_500)
"""Tokens of a tool's output: the shortest and the longest, as many short as long ones by their logarithm."""
ANSWER = 32

_FORKED = (0.25, 0.55, 0.8)
_EDITED = (0.45, 0.7)
_CANCELLED = (0.3, 0.65)
_KILLED = (0.5, 0.9)
"""After which parts of the turns that happens."""

SAMPLE = (
    "the file has lines with errors in function main return value of index table row key open close read write test "
    "passed failed warning at path src lib build cache size bytes time user name data list map set type int string"
)
_WORDS = SAMPLE.split()


class Kind(str, Enum):
    """What is done."""

    ASK = "ask"
    FORK = "fork"
    EDIT = "edit"
    CANCEL = "cancel"
    KILL = "kill"


@dataclass(frozen=True)
class Act:
    """One thing that is done: a text of about `tokens` tokens is answered with `answer` tokens, in the conversation, in
    a fork that is dropped, or until it is cancelled after half of them; or it takes the place of the message `place`.
    """

    kind: Kind
    tokens: int = 0
    answer: int = ANSWER
    place: int = 0
    seed: int = 0


def make_script(
    seed: int, turns: int = TURNS, output: tuple[int, int] = OUTPUT, answer: int = ANSWER, kills: bool = True
) -> list[Act]:
    """The acts of so many turns."""
    random = np.random.default_rng(seed)
    lengths = Prompts(2, seed).lengths(turns, *output)

    def after(parts: tuple[float, ...]) -> set[int]:
        return {round(part * turns) for part in parts}

    acts: list[Act] = []
    killed = 0  # and so not counted: who is not killed reads the same

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
        if turn in after(_KILLED):  # what is timed is finding the conversation again, not a tool's long output
            add(Kind.ASK, output[0])
    return acts


def text(act: Act, tokens_per_word: float) -> str:
    """What a tool says: words and numbers, about as many tokens as the act has."""
    random = np.random.default_rng(act.seed)
    count = max(1, round(act.tokens / tokens_per_word))
    words = [_WORDS[i] for i in random.integers(0, len(_WORDS), count)]
    return " ".join(words)


def tokens_per_word(tokenized: int) -> float:
    """For `text`, from how many tokens `SAMPLE` has."""
    return max(1.0, tokenized / len(_WORDS))
