"""A RemoteRunner does what one runner does: the same tokens, and the same answers to refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engine.core_driver import Driver
from support.engine.same_tokens import TIGHT, prompts_of
from support.hosts.whole_ranks import engines_on_ranks

Tiny = Callable[[str], Path]


def _answers(model: Path, **config: Any) -> list[tuple[int, ...]]:
    driver = Driver(model, **config)
    handles = [driver.add(prompt, 24, seed=seed) for seed, prompt in enumerate(prompts_of())]
    driver.finish()
    handles += [
        driver.add(prompt, 24, seed=seed, temperature=0.8, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.2)
        for seed, prompt in enumerate(prompts_of())
    ]
    driver.finish()
    driver.core.check_invariants()
    answers = [driver.result(handle).token_ids for handle in handles]
    driver.core.release()
    return answers


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_tokens_are_those_of_one_runner(tiny: Tiny, ranks: int) -> None:
    expected = _answers(tiny("llama"), tokens=TIGHT, max_rows=8)
    with engines_on_ranks(ranks, tiny("llama"), compare_every=1):
        assert _answers(tiny("llama"), tokens=TIGHT, max_rows=8) == expected
