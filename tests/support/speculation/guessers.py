"""Sources of drafts for tests: whoever guesses the next tokens of an answer, right, wrong or out of bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Guess = Callable[[random.Random, Sequence[int], int, int], list[int]]
"""From an answer's tokens, how many of them are known, and the size of the vocabulary: guesses of those that follow."""


def right(dice: random.Random, answer: Sequence[int], known: int, vocab: int) -> list[int]:
    """An oracle."""
    return list(answer[known : known + dice.randint(1, 15)])


def too_long(dice: random.Random, answer: Sequence[int], known: int, vocab: int) -> list[int]:
    """Right, past the answer's end, past `max_tokens` and the arena."""
    return [*answer[known:], *(dice.randrange(vocab) for _ in range(300))]


def wrong(dice: random.Random, answer: Sequence[int], known: int, vocab: int) -> list[int]:
    """An adversary: no token is right."""
    return [(token + dice.randrange(1, vocab)) % vocab for token in answer[known : known + dice.randint(1, 15)]]


def in_stretches(dice: random.Random, answer: Sequence[int], known: int, vocab: int) -> list[int]:
    """Right for a while."""
    tokens = list(answer[known : known + dice.randint(1, 15)])
    for place in range(dice.randint(0, len(tokens)), len(tokens)):
        tokens[place] = dice.randrange(vocab) if dice.random() < 0.5 else tokens[place]
    return tokens


def at_the_edge(dice: random.Random, answer: Sequence[int], known: int, vocab: int) -> list[int]:
    """Token ids at the edge of the vocabulary, and such as there are none."""
    tokens = list(answer[known : known + 6])
    edges = (0, vocab - 1, vocab, vocab + 1, -1, -vocab, 2**31 - 1, 2**31, 2**63, -(2**63))
    tokens.insert(dice.randint(0, len(tokens)), dice.choice(edges))
    return tokens


def nothing(dice: random.Random, answer: Sequence[int], known: int, vocab: int) -> list[int]:
    """No guess."""
    return []


GUESSES: tuple[Guess, ...] = (right, right, too_long, wrong, in_stretches, in_stretches, at_the_edge, nothing)
