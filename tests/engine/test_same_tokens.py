"""The same tokens whatever the engine does on the way: prefix cache, preemption, forks, token budgets, pipelining, an
arena that grows and shrinks. Greedy tokens are judged by mlx-lm, up to proven ties; seeded ones by the engine's
plainest setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import assert_same
from support.engine.same_tokens import SETTINGS, TOKENS, prompts_of
from support.models.tiny import tokens_of


def driver_of(model: Any, setting: str) -> Driver:
    return Driver(model, **({"tokens": 4096, "max_rows": 4} | SETTINGS[setting]))


QUICK = ("budget 16", "tight, not pipelined")
EVERY = [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS if s != "plain"]


@pytest.mark.parametrize("setting", ["plain", *EVERY])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama4", "afm7"))])
def test_greedy_tokens(tiny: Any, judged: Any, theirs: Any, name: str, setting: str) -> None:
    prompts = prompts_of()
    driver = driver_of(tiny(name), setting)
    answers = driver.answers(prompts, TOKENS, ignore_eos=False)
    for prompt, mine in zip(prompts, answers, strict=True):
        assert_same(judged(name)[0], prompt, mine, theirs(name, prompt, TOKENS))
    stats = driver.core.stats()
    if "tight" in setting:
        assert stats.preemptions >= len(prompts) / 2, "the arena must be too small for this test to say anything"
    assert_nothing_lost(stats)


@pytest.fixture(scope="module")
def sampled(tiny: Any) -> list[list[tuple[int, ...]]]:
    """Three seeded answers to each prompt, one request at a time."""
    driver = driver_of(tiny("llama"), "plain")
    return seeded(driver, prompts_of())


def seeded(driver: Driver, prompts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    handles = [
        driver.add(p, TOKENS, seed=i, n=3, temperature=0.8, top_p=0.9, repetition_penalty=1.1)
        for i, p in enumerate(prompts)
    ]
    driver.finish()
    done = [driver.result(h) for h in handles]
    return [[c.token_ids for c in (first, *first.others)] for first in done]


@pytest.mark.parametrize("setting", EVERY)
def test_seeded_tokens_of_several_answers(tiny: Any, sampled: Any, setting: str) -> None:
    driver = driver_of(tiny("llama"), setting)
    assert seeded(driver, prompts_of()) == sampled
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("every", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_an_arena_that_grows_and_shrinks_all_the_time(tiny: Any, theirs: Any, every: int) -> None:
    driver = Driver(tiny("llama"), tokens=16_384, max_rows=4, prefill_budget=64)
    prompts = prompts_of()
    long = tokens_of(300, seed=3)
    handles = [driver.add(p, TOKENS) for p in prompts] + [driver.add(long, TOKENS)]
    assert driver.finish_resizing(every) > 3, "the arena must have changed its size"
    for prompt, handle in zip([*prompts, long], handles, strict=True):
        assert list(driver.result(handle).token_ids) == theirs("llama", prompt, TOKENS)
    assert_nothing_lost(driver.core.stats())


# -- real weights -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any, Any]:
    """The starter model's name for the engine, and mlx-lm's model and tokenizer of the same weights."""
    from cortexmlx.models import load_model

    loaded = load_model("smollm2")
    return "smollm2", loaded.model, loaded.tokenizer


def real_prompts(tokenizer: Any) -> list[list[int]]:
    from support.prompts import prompt_of

    common = prompt_of(tokenizer, 64)
    return [[*common[: n // 2], *prompt_of(tokenizer, n - n // 2, start=n)] for n in (24, 30, 41, 33, 47, 52)]


@pytest.mark.model
def test_real_weights(real: Any) -> None:
    """Over the next block's border, with a common beginning, beside the plainest setting's, up to proven ties."""
    name, judge, tokenizer = real
    prompts = real_prompts(tokenizer)
    wanted = Driver(name, tokens=4096, block_size=16, **SETTINGS["plain"]).answers(prompts, 18)
    driver = Driver(name, tokens=4096, max_rows=4, block_size=16)
    for prompt, mine, theirs in zip(prompts, driver.answers(prompts, 18), wanted, strict=True):
        assert_same(judge, prompt, mine, theirs, 0.05)
    assert_nothing_lost(driver.core.stats())
