"""Ten times more requests than fit, short ones and such that fill the cache alone: all are answered, with the tokens
that each gets alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.recurrent import RECURRENT
from support.models.tiny import tokens_of

ROWS, TOKENS = 3, 160


def mix(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts and how many tokens are asked for: most are short, every fifth takes most of the cache."""
    chance = random.Random(seed)
    lengths = [chance.randrange(100, 130) if i % 5 == 2 else chance.randrange(1, 30) for i in range(count)]
    return [(tokens_of(n, seed=1_000 * seed + i), chance.randrange(4, 24)) for i, n in enumerate(lengths)]


SLOW = [("windowed llama", 10), ("deepseek_v3", 10), ("lfm2", 10), ("mamba2", 10), ("llama", 60)]


@pytest.mark.parametrize(
    ("name", "times"), [("llama", 10), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_all_of_ten_times_more_requests_than_fit_are_answered(name: str, times: int, tiny: Any) -> None:
    asked = mix(times * ROWS, seed=times)
    alone = Driver(tiny(name), tokens=512, max_rows=1, prefix_cache=False, snapshots=4)
    wanted = [alone.answers([prompt], count)[0] for prompt, count in asked]
    tokens = TOKENS * 4 // 3 + 8 if name in RECURRENT else TOKENS  # a quarter is for snapshots
    driver = Driver(tiny(name), tokens=tokens, max_rows=ROWS, prefill_budget=24, snapshots=4)
    handles = [driver.add(prompt, count) for prompt, count in asked]
    driver.finish()
    driver.core.check_invariants()
    assert [driver.result(handle).token_ids for handle in handles] == wanted
    if name != "mamba2":  # whose tokens take nothing
        assert driver.core.scheduler.preemptions > 0, "they were too many"
    driver.core.relieve(True)
    assert_nothing_lost(driver.core.stats())
