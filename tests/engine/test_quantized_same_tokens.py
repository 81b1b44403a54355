"""The same tokens with quantized keys and values whatever the engine does on the way: prefix cache, preemption, forks,
token budgets, pipelining, an arena that grows and shrinks, rows that drain at other places.

The judge is mlx-lm on rounding caches, up to ties. A number on the border of two codes takes either by its last bit, so
a tie is proven with noise of that size (`gap_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.same_tokens import SETTINGS, TOKENS, prompts_of
from support.models.quantized_models import assert_rounded, loaded, wide
from support.models.tiny import tokens_of
from support.store.stored import Stored
from tests.engine.test_stale_data import Poison

Judge = Callable[[Sequence[int], Sequence[int]], None]
QUICK = [("tight", 4)]
REST = [(s, (8, 4)[i % 2]) for i, s in enumerate(SETTINGS)]
OTHERS = ("windowed llama", "llama4", "gpt_oss", "gemma3n", "deepseek_v3", "qwen3_next", "falcon_h1")
EVERY = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide(tmp_path_factory.mktemp("wide"), "llama")


def driver_of(folder: Path, setting: str, bits: int) -> Driver:
    return Driver(folder, **({"tokens": 4096, "max_rows": 4, "kv_bits": bits} | SETTINGS[setting]))


def check_greedy(folder: Path, driver: Driver, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> None:
    stats = driver.core.stats()
    bits, group = stats.kv_bits, stats.kv_group_size
    assert bits is not None and group is not None
    model = loaded(folder)[0]
    for prompt, mine in zip(prompts, answers, strict=True):
        assert_rounded(model, prompt, mine, TOKENS, bits, group)
    assert_nothing_lost(stats)


@pytest.mark.parametrize(("setting", "bits"), EVERY)
def test_greedy_tokens(folder: Path, setting: str, bits: int) -> None:
    prompts = prompts_of()
    driver = driver_of(folder, setting, bits)
    check_greedy(folder, driver, prompts, driver.answers(prompts, TOKENS))
    if "tight" in setting:
        assert driver.core.stats().preemptions >= len(prompts) / 2, "the arena must be too small"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting", "bits"),
    zip(OTHERS, ("tight", "budget 16", "tight, not pipelined") * 3, (8, 4) * 4, strict=False),
)
def test_greedy_tokens_of_other_kinds(name: str, setting: str, bits: int, tmp_path: Path) -> None:
    other, prompts = wide(tmp_path, name), prompts_of()
    driver = driver_of(other, setting, bits)
    check_greedy(other, driver, prompts, driver.answers(prompts, TOKENS))


@pytest.mark.parametrize(
    "name", ["windowed llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt_oss", "deepseek_v3"))]
)
def test_poisoned_memory_changes_no_answer(name: str, tmp_path: Path) -> None:
    """NaN in the scales of every free block, every unwritten slot and every unused column of a tail."""
    other, answers, poisoned = wide(tmp_path, name), [], 0
    for poison in (False, True):
        driver = Driver(other, tokens=144, prefill_budget=14, kv_bits=4)
        filled = Poison(driver) if poison else None
        answers.append(driver.answers(prompts_of()[:5], 24))
        poisoned = filled.slots if filled else 0
    assert answers[0] == answers[1] and poisoned > 500


@pytest.mark.parametrize("every", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_an_arena_that_grows_and_shrinks_all_the_time(folder: Path, every: int) -> None:
    driver = Driver(folder, tokens=16_384, max_rows=4, prefill_budget=64, kv_bits=8)
    prompts = [*prompts_of()[:4], tokens_of(300, seed=3)]
    handles = [driver.add(p, TOKENS) for p in prompts]
    assert driver.finish_resizing(every) > 2, "the arena must have changed its size"
    check_greedy(folder, driver, prompts, [driver.result(h).token_ids for h in handles])


def test_the_next_engine_finds_codes_on_disk_and_another_number_of_bits_none(folder: Path, tmp_path: Path) -> None:
    prompt, cached = tokens_of(90, seed=4), []
    for bits in (8, 8, 4):
        with Stored(folder, tmp_path, kv_bits=bits) as driver:
            answer, found = driver.ask(prompt)
            cached.append(found)
            assert_rounded(loaded(folder)[0], prompt, answer, len(answer), bits, 32)
    assert cached == [0, 88, 0]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_second_turn_begins_with_the_very_bytes_of_the_first(folder: Path, bits: int) -> None:
    """What was drained from the tail and what a prompt's piece wrote are found again, and so is a partial block."""
    driver = Driver(folder, tokens=1024, kv_bits=bits)
    prompt = tokens_of(21, seed=5)
    (first,) = driver.answers([prompt], TOKENS)
    turn = [*prompt, *first, *tokens_of(9, seed=6)]
    again = driver.result_of(turn, TOKENS)
    assert again.usage.cached_tokens >= len(prompt) + len(first) - 8
    check_greedy(folder, driver, [turn], [again.token_ids])
