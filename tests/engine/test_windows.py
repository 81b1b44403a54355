"""Models with windows and chunks far beyond them, through the engine's core: mlx-lm's tokens, whatever happens to the
blocks that lie behind a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from cortexmlx.scheduling import builder as placement
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import assert_same
from support.models.tiny import tokens_of

WINDOWED = ("windowed llama", "gemma3_text", "gpt_oss", "cohere2")
SHARED = tokens_of(45, seed=5)
PROMPTS = [tokens_of(n, seed=n) for n in (3, 40, 70)] + [[*SHARED, *tokens_of(n, seed=n)] for n in (2, 9, 30)]
TOKENS = 30
FAST = [("gemma3_text", "tight", 16), ("windowed llama", "pressure", 512)]
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"tokens": 200},
    "small blocks at once": {"prefill_budget": 512, "max_rows": 6},
    "no prefixes": {"prefix_cache": False},
    "forks": {"max_rows": 3},
    "pressure": {"tokens": 4096},
}


@pytest.mark.parametrize(
    ("name", "how", "origin"),
    [
        case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
        for i, name in enumerate(WINDOWED)
        for j, how in enumerate(SETTINGS)
        for case in [(name, how, (16, 512)[(i + j) % 2])]
    ],
)
def test_answers_far_beyond_the_window_are_mlx_lms(
    name: str, how: str, origin: int, tiny: Any, judged: Callable[[str], Any], theirs: Any
) -> None:
    """Asked twice, the second time with what the first left; rows count from a multiple of `origin` tokens."""
    settings = {"tokens": 1024, "max_rows": 4, "prefill_budget": 24} | SETTINGS[how]
    forks = 3 if how == "forks" else 1
    with mock.patch.object(placement, "ORIGIN_UNIT", origin):
        driver = Driver(tiny(name), **settings)
        for _ in range(2):
            handles = []
            for i, prompt in enumerate(PROMPTS):
                handles.append(driver.add(prompt, TOKENS, ignore_eos=False, n=forks, temperature=0.0))
                driver.step(3 * i)
                driver.core.check_invariants()
                if how == "pressure":
                    driver.core.relieve(i % 2 == 0)
            driver.finish()
            for prompt, handle in zip(PROMPTS, handles, strict=True):
                wanted = theirs(name, prompt, TOKENS)
                result = driver.result(handle)
                assert len(result.others) == forks - 1
                for answer in (result, *result.others):
                    assert_same(judged(name)[0], prompt, answer.token_ids, wanted)
    assert_nothing_lost(driver.core.stats())
    assert how != "tight" or driver.core.scheduler.preemptions


@pytest.mark.parametrize("name", ["windowed llama", "gemma3_text"])
def test_a_second_turn_beyond_the_window_computes_only_its_own_tokens(tiny: Any, theirs: Any, name: str) -> None:
    driver = Driver(tiny(name), tokens=1024)
    text = tokens_of(60, seed=1)
    first = driver.answers([text], 20, ignore_eos=False)[0]
    turn = [*text, *first, *tokens_of(5, seed=2)]
    done = driver.result_of(turn, 10, ignore_eos=False)
    assert done.usage.cached_tokens == len(text) + len(first) - 1
    assert list(done.token_ids) == theirs(name, turn, 10)
    held = driver.core.cache.stats()
    assert held.used_blocks == 0
