"""Rows that stay in one run, headroom that keeps nobody waiting, and an arena that grows on demand."""

from __future__ import annotations

from typing import Any

import pytest

from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of


def test_headroom_does_not_keep_others_waiting(tiny: Any) -> None:
    """Twenty blocks: four for each prompt, and headroom that the first row would keep until its end."""
    driver = Driver(tiny("one layer"), tokens=160, max_rows=4)
    driver.add(tokens_of(30, seed=1), 120)
    driver.step(3)
    assert driver.core.cache.pools.obtainable_blocks(0) < 4, "the first row has taken what is free as headroom"
    second = driver.add(tokens_of(30, seed=2), 4)
    driver.step(8)
    assert driver.result(second).token_ids
    assert driver.core.scheduler.preemptions == 0
    driver.finish()


@pytest.mark.parametrize("rows", [1, 6])
def test_most_rows_are_one_run(tiny: Any, rows: int) -> None:
    driver = Driver(tiny("one layer"), tokens=8192, max_rows=rows)
    for i in range(3 * rows):
        driver.add(tokens_of(10 + 7 * i % 50, seed=i), 30 + 11 * i % 60)
    shares = []
    while not driver.core.idle:
        driver.step()
        shares.append(driver.core.stats().single_run_share)
    assert sum(shares) / len(shares) > 0.9


def test_the_arena_begins_small_and_grows_up_to_its_limit(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=6144, max_rows=16, prefill_budget=512)
    before = driver.core.stats()
    assert before.total_blocks == 256 and before.kv_bytes < before.kv_bytes_limit / 2
    prompts = [tokens_of(400, seed=i) for i in range(14)]
    answers = driver.answers(prompts, 30)
    assert answers[::5] == [tuple(theirs("one layer", p, 30)) for p in prompts[::5]]
    after = driver.core.stats()
    per_256 = int(before.kv_bytes * 256 / 258)  # without the null and the scratch block
    assert before.total_blocks < after.total_blocks <= 768 == after.kv_bytes_limit * 256 // per_256
    assert_nothing_lost(after)


def test_the_arena_does_not_grow_for_what_fits(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=8192)
    driver.answers([tokens_of(50, seed=i) for i in range(8)], 20)
    assert driver.core.stats().total_blocks == 256


@pytest.mark.parametrize("first", [60, 250])
def test_rows_that_decode_while_the_arena_grows_keep_their_tokens(tiny: Any, theirs: Any, first: int) -> None:
    driver = Driver(tiny("windowed llama"), tokens=6144, max_rows=8, prefill_budget=512)
    early = tokens_of(first, seed=first)
    handle = driver.add(early, 120, ignore_eos=False)
    driver.step(20)
    sizes = {driver.core.runner.arena.blocks}
    for i in range(7):
        driver.add(tokens_of(450, seed=i), 10)
    while not driver.core.idle:
        driver.step()
        sizes.add(driver.core.runner.arena.blocks)
    assert len(sizes) > 1
    assert list(driver.result(handle).token_ids) == theirs("windowed llama", early, 120)
