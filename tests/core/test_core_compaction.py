"""The core moves blocks together while nothing runs: what is free becomes one run, what is cached is found again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of


def scattered(driver: Driver) -> list[list[int]]:
    """Cache eight texts, then evict every other one. Returns those that stay."""
    texts = [tokens_of(60, seed=i) for i in range(8)]
    driver.answers(texts, 1)
    cache = driver.core.cache
    for text in texts[::2]:  # touched last, so the others go first
        match = cache.match(text, cache.prefix.keys(text), 60)
        cache.allocate_for(999, 56, match=replace(match, partial=None, partial_tokens=0))
        cache.free(999)
    gone = cache.pools.unused_entries - 4 * 7
    cache.pools.drop_cached(gone)
    return texts[::2]


@pytest.mark.parametrize("name", ["windowed llama"])
def test_cached_texts_survive_compaction(tiny: Any, theirs: Any, name: str) -> None:
    driver = Driver(tiny(name), tokens=1024)
    kept = scattered(driver)
    before = driver.core.stats()
    assert before.fragmentation > 0
    moved = driver.core.compact()
    after = driver.core.stats()
    assert moved > 0 == after.fragmentation and driver.core.compact() == 0
    assert (after.cached_blocks, after.total_blocks) == (before.cached_blocks, before.total_blocks)
    driver.core.cache.check_invariants()
    for text in kept:
        handle = driver.add(text, 20)
        driver.finish()
        assert driver.result(handle).usage.cached_tokens == 56
        assert list(driver.result(handle).token_ids) == theirs(name, text, 20)
    assert_nothing_lost(driver.core.stats())


def test_nothing_moves_while_a_row_runs(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("llama"), tokens=1024)
    kept = scattered(driver)
    handle = driver.add(kept[0], 30)
    driver.step(4)
    assert driver.core.compact() == 0
    driver.core.tidy()
    driver.finish()
    assert list(driver.result(handle).token_ids) == theirs("llama", kept[0], 30)


def test_after_compaction_the_free_end_can_be_given_back(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("llama"), tokens=1024)
    kept = scattered(driver)
    blocks = driver.core.cache.pools.blocks
    driver.core.compact()
    driver.core.cache.pools.shrink(1)
    assert driver.core.cache.pools.blocks == (driver.core.stats().cached_blocks,) < blocks
    assert driver.answers(kept, 12) == [tuple(theirs("llama", t, 12)) for t in kept]


def test_an_idle_engine_tidies_up_only_when_it_is_badly_fragmented(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=512)
    driver.answers([tokens_of(60, seed=1)], 1)
    table = driver.core.cache.pools[0].allocator.block_map()
    driver.core.tidy()
    assert driver.core.cache.pools[0].allocator.block_map() == table
