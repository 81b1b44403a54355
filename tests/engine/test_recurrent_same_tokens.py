"""The same tokens of recurrent models whatever the engine does on the way, judged by mlx-lm up to proven ties."""

from __future__ import annotations

from typing import Any

import pytest

from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import assert_same
from support.engine.same_tokens import TIGHT, prompts_of
from support.models.recurrent import RECURRENT
from support.models.tiny import tokens_of

TOKENS = 24

SETTINGS: dict[str, dict[str, Any]] = {
    "prefix cache": {},
    "few snapshots": {"snapshots": 2},
    "no snapshots": {"snapshots": 0},
    "no prefix cache": {"prefix_cache": False},
    "not pipelined": {"pipeline": False},
    "budget 16": {"prefill_budget": 16},
    "tight": {"tokens": TIGHT, "max_rows": 8},
    "tight, few snapshots": {"tokens": TIGHT, "max_rows": 8, "snapshots": 3},
    "tight, no prefix cache": {"tokens": TIGHT, "max_rows": 8, "prefix_cache": False},
    "tight, not pipelined": {"tokens": TIGHT, "max_rows": 8, "pipeline": False},
    "tight, budget 16": {"tokens": TIGHT, "max_rows": 8, "prefill_budget": 16},
    "big blocks": {"block_size": 64},
}
MODELS = ("falcon_h1", "lfm2", "qwen3_next", "rwkv7", "recurrent_gemma")
CASES = [
    pytest.param(MODELS[i % len(MODELS)], setting, marks=() if setting == "tight" else pytest.mark.slow)
    for i, setting in enumerate(SETTINGS)
]


def driver_of(model: Any, tokens: int = 4096, snapshots: int = 32, **config: Any) -> Driver:
    driver = Driver(model, tokens=tokens, **({"max_rows": 4} | config))
    cache = driver.core.cache
    assert cache.states.snapshots is not None
    cache.states.snapshots.max_snapshots = snapshots
    driver.limit_blocks(tokens)
    return driver


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_greedy_tokens(name: str, setting: str, tiny: Any, judged: Any, theirs: Any) -> None:
    driver = driver_of(tiny(name), **SETTINGS[setting])
    prompts = prompts_of()
    for params in ({}, {"n": 3}):
        handles = [driver.add(prompt, TOKENS, ignore_eos=False, **params) for prompt in prompts]
        driver.finish()
        driver.core.check_invariants()
        for prompt, handle in zip(prompts, handles, strict=True):
            first = driver.result(handle)
            for answer in (first, *first.others):
                wanted = theirs(name, prompt, TOKENS)
                assert_same(judged(name)[0], prompt, answer.token_ids, wanted)
    stats = driver.core.stats()
    assert "tight" not in setting or stats.preemptions >= len(prompts) / 2, "the arena must be too small"
    assert_nothing_lost(stats)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_an_arena_that_grows_and_shrinks_all_the_time(name: str, tiny: Any, judged: Any, theirs: Any) -> None:
    driver = driver_of(tiny(name), tokens=16_384, prefill_budget=64)
    prompts = [*prompts_of(), tokens_of(300, seed=3)]
    handles = [driver.add(p, TOKENS, ignore_eos=False) for p in prompts]
    driver.finish_resizing(3)
    for prompt, handle in zip(prompts, handles, strict=True):
        assert_same(judged(name)[0], prompt, driver.result(handle).token_ids, theirs(name, prompt, TOKENS))
    assert_nothing_lost(driver.core.stats())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_every_recurrent_model_in_a_tight_arena(name: str, tiny: Any, judged: Any, theirs: Any) -> None:
    test_greedy_tokens(name, "tight", tiny, judged, theirs)
