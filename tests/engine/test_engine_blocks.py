"""The picture of the arena: while requests run, when they have ended, with a KV store, and from any thread."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from cortexmlx import BlockMap, BlockState, Engine
from support.engine.asked import LONG
from support.engine.core_driver import Driver
from support.engine.held import hold_long_answers
from support.models.tiny import tokens_of
from support.scheduling.blocks import check_block_map
from support.store.stored import Stored

PROMPT = tokens_of(80, seed=5)
"""Ten blocks of eight tokens."""


def counts(picture: BlockMap) -> dict[str, int]:
    """How many blocks are in which state, without the free ones."""
    states = Counter(state for group in picture.groups for state in group.states)
    return {BlockState(state).name: count for state, count in sorted(states.items()) if state != BlockState.FREE}


def test_answers_of_one_prompt_share_its_blocks_and_leave_them_cached(tiny: Any) -> None:
    driver = Driver(tiny("llama"))
    driver.add(PROMPT, 20, n=3)
    for _ in range(8):
        driver.step()
        check_block_map(driver.core.cache)
    assert counts(driver.core.cache.pools.block_map())["SHARED"] == 9, "of ten the last is each one's own"
    driver.finish()
    driver.core.tidy()
    check_block_map(driver.core.cache)
    assert set(counts(driver.core.cache.pools.block_map())) == {"CACHED"}


def test_a_group_of_windows_has_a_picture_of_its_own(tiny: Any) -> None:
    driver = Driver(tiny("gemma3_text"))
    driver.add(PROMPT, 20)
    driver.step(5)
    windows, whole = sorted(driver.core.cache.pools.block_map().groups, key=lambda group: group.window is None)
    assert windows.window is not None and whole.window is None
    assert windows.count(BlockState.PRIVATE) < whole.count(BlockState.PRIVATE) == 13, "room for 80 tokens and 20"
    assert [len(g.layers) for g in driver.core.cache.groups] == [
        g.layers for g in driver.core.cache.pools.block_map().groups
    ]
    check_block_map(driver.core.cache)


def test_what_is_cached_and_on_disk_is_told_from_what_is_only_cached(tiny: Any, tmp_path: Path) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(PROMPT)
        assert counts(driver.core.cache.pools.block_map())["CACHED"] >= 2, "some wait to be written"
        driver.rest()
        now = counts(driver.core.cache.pools.block_map())
        assert now == {"CACHED": 1, "STORED": driver.counts.stored_blocks}, "the last block is not full"
        check_block_map(driver.core.cache)
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(PROMPT)
        assert counts(driver.core.cache.pools.block_map())["STORED"] >= driver.counts.read_blocks > 0


def test_the_picture_is_taken_while_answers_are_written_and_agrees_with_the_counts(engine: Engine) -> None:
    let_go = hold_long_answers(engine)
    handles = [engine.submit(PROMPT, LONG), engine.submit(PROMPT[:50], LONG)]
    for handle in handles:
        next(iter(handle))
    seen = [engine.blocks() for _ in range(4)]
    picture, stats = engine.inspect(lambda core: (core.cache.pools.block_map(), core.stats()))
    assert picture.count(BlockState.PRIVATE) + picture.count(BlockState.SHARED) == stats.used_blocks > 0
    let_go()
    while not all(handle.ended for handle in handles):
        seen.append(engine.blocks())
    assert any(picture.count(BlockState.PRIVATE) for picture in seen)
    assert all(sum(map(p.count, BlockState)) == p.total for p in seen)
    assert engine.blocks().count(BlockState.PRIVATE) == 0
    per_token = sum(group.block_bytes for group in seen[0].groups) / seen[0].block_size
    assert per_token == engine.info.kv_bytes_per_token
