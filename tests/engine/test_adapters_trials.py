"""Rows with five adapters and none on models of every kind, and random trials of what can happen to them.

`TRIALS=100 make test-slow ARGS=tests/engine/test_adapters_trials.py` runs more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.adapters.kinds import NAMES, Adapted, adapted_kinds, content
from support.adapters.trial import AdaptedTrial
from support.effort import examples, trial_seeds
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import NOISE, assert_same
from support.models.tiny import tokens_of
from support.speculation.counts import Counts
from support.speculation.kinds import alone, judge

TOKENS = examples(16, few=10)
QUICK = ("windowed llama", "deepseek_v3", "lfm2", "llama of 4 bits", "8 bits")
"""Windows, latents, states, quantized weights, quantized keys and values."""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    return adapted_kinds(tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_rows_with_all_adapters_and_none_get_mlx_lms_tokens(name: str, adapted: Callable[[str], Adapted]) -> None:
    """All of them in one batch, joining step by step: prompts of one beside decoding rows of others."""
    of = adapted(name)
    driver = Driver(of.kind.folder, tokens=4096, max_rows=12, prefill_budget=12, kv_bits=of.kind.kv_bits)
    for folder in of.adapters:
        driver.core.adapters.load(folder.name, content(folder), driver.core.scheduler.jobs)
    asked = []
    for length in (3, 21):
        for folder in (*of.adapters, None):
            prompt = tokens_of(length, seed=length)
            handle = driver.add(prompt, TOKENS, ignore_eos=False, adapter=None if folder is None else folder.name)
            asked.append((folder, prompt, handle))
            driver.step(2)
    driver.finish()
    noise = NOISE if of.kind.kv_bits is None else 1.0
    for folder, prompt, handle in asked:
        mine, theirs = driver.result(handle).token_ids, alone(of.kind.folder, folder, prompt, TOKENS)
        assert_same(judge(of.kind.folder, folder), prompt, mine, theirs, noise)
    assert_nothing_lost(driver.core.stats())
    driver.core.release()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_random_requests_beside_engines_with_one_adapter(
    name: str, adapted: Callable[[str], Adapted], tmp_path: Path
) -> None:
    counts = Counts()
    for seed in range(2 if name == "llama" else 1):
        AdaptedTrial(seed, adapted(name), store=tmp_path / str(seed)).run(counts)
    assert counts.answers > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_random_requests(name: str, adapted: Callable[[str], Adapted], tmp_path: Path) -> None:
    counts = Counts()
    for seed in trial_seeds(20):
        print("seed", seed)
        AdaptedTrial(seed, adapted(name), store=tmp_path / str(seed)).run(counts)
    assert counts.preemptions > 5 and counts.cancelled
