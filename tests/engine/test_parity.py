"""Greedy tokens equal mlx-lm's on tiny models of every way of attending, alone and together, joining at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cortexmlx.types.request import RequestState
from support.effort import examples
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import assert_same
from support.models.tiny import CONFIGS, tokens_of

QUICK = ("llama", "gpt_oss", "deepseek_v3", "llama4", "gemma3n", "afm7")
"""Everything, windows with sinks, latents, chunks, layers that read what others keep and that have none."""
LENGTHS = (1, 7, 8, 9, 23, 61)
TOKENS = examples(24, few=16)


def assert_all_same(model: Any, prompts: Sequence[Sequence[int]], mine: Any, theirs: Any) -> None:
    for prompt, a, b in zip(prompts, mine, theirs, strict=True):
        assert_same(model, prompt, a, b)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_a_crowd_that_joins_step_by_step_gets_mlx_lms_tokens(
    name: str, tiny: Any, judged: Callable[[str], Any], theirs: Any
) -> None:
    prompts = [tokens_of(n, seed=n) for n in LENGTHS]
    wanted = [theirs(name, p, TOKENS) for p in prompts]
    driver = Driver(tiny(name), max_rows=4, prefill_budget=12)
    handles = []
    for i, prompt in enumerate(prompts):
        handles.append(driver.add(prompt, TOKENS, ignore_eos=False))
        driver.step(i * 3)
    driver.finish()
    assert_all_same(judged(name)[0], prompts, [driver.result(h).token_ids for h in handles], wanted)
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize(("block_size", "pipeline"), [(8, True), (32, False), (128, True)])
def test_alone_and_in_a_batch_at_every_block_size(
    block_size: int, pipeline: bool, tiny: Any, judged: Callable[[str], Any], theirs: Any
) -> None:
    prompts = [tokens_of(n, seed=n) for n in LENGTHS]
    wanted = [theirs("windowed llama", p, TOKENS) for p in prompts]
    driver = Driver(tiny("windowed llama"), tokens=1024, max_rows=9, block_size=block_size, pipeline=pipeline)
    model = judged("windowed llama")[0]
    assert_all_same(model, prompts, driver.answers(prompts, TOKENS, ignore_eos=False), wanted)
    alone = [driver.answers([p], TOKENS, ignore_eos=False)[0] for p in prompts[::3]]
    assert_all_same(model, prompts[::3], alone, wanted[::3])


def test_scattered_rows_get_the_tokens_of_rows_in_one_run(tiny: Any, judged: Callable[[str], Any], theirs: Any) -> None:
    """Requests that end leave holes, and a long prompt takes several of them."""
    driver = Driver(tiny("llama"), tokens=320, max_rows=9)
    short = [driver.add(tokens_of(8, seed=i), 24) for i in range(8)]
    driver.step(4)
    for handle in short[1::2]:
        handle.cancel()
    long = tokens_of(100, seed=7)
    handle = driver.add(long, 30, ignore_eos=False)
    while handle.state is not RequestState.PREFILLING:
        driver.core.step()
    job = max(driver.core.requests.answers)
    assert driver.core.cache.tables.find_run(job, 0, 100) is None, "the prompt must lie in several runs"
    driver.finish()
    assert_all_same(judged("llama")[0], [long], [driver.result(handle).token_ids], [theirs("llama", long, 30)])
