"""What engines find on disk that others have kept there before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.engine.judge import NOISE, disagreement
from support.models.recurrent import RECURRENT
from support.models.tiny import tokens_of
from support.store.stored import Stored

LONG = tokens_of(90, seed=4)
"""A prompt of eleven whole blocks and a part."""


def check_restarts(name: str, opened: Callable[[], Stored], judged: Any, theirs: Any) -> None:
    """Ask repeats, longer prompts, and one that parts in the middle, each of an engine of its own, all of them twice.
    mlx-lm's own cache is the judge of all tokens.
    """
    prompts: Sequence[list[int]] = [
        LONG,
        [*LONG, *tokens_of(12, seed=1)],
        [*LONG[:50], *tokens_of(30, seed=2)],
    ]
    found = []
    for _ in range(2):
        for prompt in prompts:
            with opened() as driver:
                answer, cached = driver.ask(prompt)
                driver.core.check_invariants()
            gap = disagreement(judged(name)[0], prompt, answer, theirs(name, prompt, 10))
            assert gap is None or gap[1] < NOISE, gap
            found.append(cached)
    parts = 48 if name not in RECURRENT else 0  # no state was kept there
    assert found == [0, 88, parts, 88, 96, 72]
