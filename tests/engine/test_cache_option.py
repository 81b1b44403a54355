"""`cache=False`: a request that finds nothing in the prefix cache and leaves nothing there, with the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of
from support.store.stored import Stored

PROMPT = tokens_of(45, seed=9)
KINDS = ["llama", "windowed llama", "lfm2"]


@pytest.mark.parametrize("name", KINDS)
def test_it_finds_nothing_leaves_nothing_and_says_the_same(tiny: Any, name: str) -> None:
    driver = Driver(tiny(name), tokens=2048)
    first = driver.result_of(PROMPT, 20, cache=False)
    assert len(driver.core.cache.prefix) == 0
    assert_nothing_lost(driver.core.stats())
    usual = driver.result_of(PROMPT, 20)
    assert usual.usage.cached_tokens == 0 and usual.token_ids == first.token_ids
    known = {entry.key for entry in driver.core.cache.prefix.entries}
    again = driver.result_of([*PROMPT, *tokens_of(20, seed=1)], 20, cache=False)
    assert again.usage.cached_tokens == 0
    assert {entry.key for entry in driver.core.cache.prefix.entries} == known
    assert driver.result_of(PROMPT, 20).usage.cached_tokens == 44, "others still find theirs"
    assert driver.result_of([*PROMPT, *tokens_of(20, seed=1)], 20).usage.cached_tokens in (44, 45), "and not 65"
    driver.core.check_invariants()


@pytest.mark.parametrize("name", KINDS)
def test_while_it_runs_nobody_waits_for_it_or_begins_with_it(tiny: Any, name: str) -> None:
    driver = Driver(tiny(name), tokens=2048, max_rows=4, prefill_budget=24)
    hidden = driver.add(PROMPT, 30, cache=False)
    driver.step(2)
    usual = [driver.add(PROMPT, 10) for _ in range(2)]
    driver.step(1)
    late = driver.add(PROMPT, 10, cache=False)
    driver.finish()
    results = [driver.result(handle) for handle in (hidden, *usual, late)]
    assert [r.usage.cached_tokens > 0 for r in results] == [False, False, True, False]
    assert len({r.token_ids[:10] for r in results}) == 1
    driver.core.check_invariants()


@pytest.mark.parametrize("name", ["llama", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_its_answers_share_its_prompt_and_it_survives_preemption(tiny: Any, theirs: Any, name: str) -> None:
    driver = Driver(tiny(name), tokens=88, max_rows=3)
    both = driver.add(PROMPT[:20], 25, cache=False, n=2, temperature=1.0, seed=5)
    alone = driver.result_of(PROMPT[:21], 40, cache=False)
    assert driver.core.scheduler.preemptions > 0
    assert alone.token_ids == tuple(theirs(name, PROMPT[:21], 40))
    assert len(driver.result(both).others) == 1 and len(driver.core.cache.prefix) == 0
    driver.core.check_invariants()


def test_a_cancelled_one_leaves_nothing(tiny: Any) -> None:
    driver = Driver(tiny("lfm2"), tokens=2048)
    handle = driver.add(PROMPT, 100, cache=False)
    driver.step(9)
    handle.cancel()
    driver.finish()
    assert len(driver.result(handle).token_ids) > 0 and len(driver.core.cache.prefix) == 0


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_it_neither_reads_the_disk_nor_writes_to_it(tiny: Any, tmp_path: Path, name: str) -> None:
    with Stored(tiny(name), tmp_path) as driver:
        driver.ask(PROMPT, cache=False)
        driver.rest()
        assert driver.counts.stored_blocks == 0
        driver.ask(PROMPT)
    with Stored(tiny(name), tmp_path) as driver:
        assert driver.ask(PROMPT, cache=False)[1] == driver.counts.read_blocks == 0
        assert driver.ask(PROMPT)[1] == 40


def test_a_model_that_keeps_one_text_forgets_it(tiny: Any, unpaged: None) -> None:
    driver = Driver(tiny("llama"))
    wanted = driver.result_of(PROMPT, 10).token_ids
    assert driver.result_of(PROMPT, 10, cache=False).usage.cached_tokens == 0
    again = driver.result_of(PROMPT, 10)
    assert (again.usage.cached_tokens, again.token_ids) == (0, wanted)


def test_it_is_an_option_of_every_way_to_ask(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    async def asynchronously() -> Any:
        return [event async for event in engine.astream(PROMPT, params, cache=False)][-1].completion

    answers = [
        engine.submit(PROMPT, params, cache=False).result(),
        engine.generate(PROMPT, params, cache=False),
        list(engine.stream(PROMPT, params, cache=False))[-1].completion,
        asyncio.run(asynchronously()),
    ]
    assert [answer.usage.cached_tokens for answer in answers] == [0] * 4
    assert engine.generate(PROMPT, params).usage.cached_tokens == 0
    assert engine.generate(PROMPT, params).usage.cached_tokens == 44
