"""Drafters that want to cost time: they look good, and then fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cortexmlx.scheduling.job import Job
from support.scheduling.speculating import Scripted


def texts_of(rows: int, tokens: int) -> list[list[int]]:
    """Texts of random tokens."""
    chance = random.Random(rows)
    return [[chance.randrange(5, 1000) for _ in range(tokens)] for _ in range(rows)]


@dataclass(frozen=True)
class Act:
    """What an adversary does for `tokens` tokens of a row."""

    tokens: int
    right: int
    """How many tokens of a guess are right; those after them are wrong."""
    chance: float = 1.0
    """How often it has a guess."""
    when: str = "always"
    """When its guesses are as `right` says, and otherwise wrong: "always", while a token is "pending", or "drained"."""
    confidence_class: int = 0


def adversary(texts: Sequence[Sequence[int]], acts: Sequence[Act], shift: int = 0, seed: int = 0) -> Scripted:
    """A drafter that plays its acts again and again. Each row is `shift` tokens ahead of the one before."""
    chance = random.Random(seed)
    length = sum(act.tokens for act in acts)

    def guess(job: Job, budget: int) -> tuple[list[int], int] | None:
        at = (job.num_generated + shift * job.id) % length
        for act in acts:
            if at < act.tokens:
                break
            at -= act.tokens
        if chance.random() >= act.chance:
            return None
        pending = job.num_planned_outputs > job.num_generated
        plays = act.when == "always" or (act.when == "pending") is pending
        rest = list(texts[job.id][job.num_generated : job.num_generated + budget])
        right = act.right if plays else 0
        tokens = [token if place < right else 0 for place, token in enumerate(rest)]
        return (tokens, act.confidence_class) if tokens else None

    return Scripted(guess)
