"""The same tokens whatever the engine does on the way: prefix cache, preemption, forks, token budgets, pipelining, an
arena that grows and shrinks. Greedy tokens are judged by mlx-lm, up to proven ties; seeded ones by the engine's
plainest setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.execution.logits import _SUM_GROUP, uniforms
from cortexmlx.serving.answers import seed_of
from support.core_driver import Driver, assert_nothing_lost
from support.judge import NOISE, disagreement
from support.tiny import tokens_of

TEMPERATURE = 0.8
"""Of the seeded answers on real weights."""
LENGTHS = (3, 17, 32, 9, 26, 40, 8, 21)
TOKENS = 40
TIGHT = 112
"""Tokens of an arena in which most of the rows lose their blocks again and again."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"prefix_cache": False, "pipeline": False, "max_rows": 1},
    "prefix cache": {"prefix_cache": True},
    "no prefix cache": {"prefix_cache": False},
    "not pipelined": {"pipeline": False},
    "budget 16": {"prefill_budget": 16},
    "budget 64": {"prefill_budget": 64},
    "budget 1024": {"prefill_budget": 1024},
    "tight": {"tokens": TIGHT, "max_rows": 8},
    "tight without prefix cache": {"tokens": TIGHT, "max_rows": 8, "prefix_cache": False},
    "tight, not pipelined": {"tokens": TIGHT, "max_rows": 8, "pipeline": False},
    "tight, budget 16": {"tokens": TIGHT, "max_rows": 8, "prefill_budget": 16},
    "a target out of reach": {"token_target": 1e-9, "prefill_budget": 512},
    "big blocks": {"block_size": 64},
}


def prompts_of() -> list[list[int]]:
    """Some begin alike, so that there is something to share."""
    common = tokens_of(24, seed=77)
    return [[*common[: n // 2], *tokens_of(n - n // 2, seed=n)] for n in LENGTHS]


def driver_of(model: Any, setting: str) -> Driver:
    return Driver(model, **({"tokens": 4096, "max_rows": 4} | SETTINGS[setting]))


def say(setting: str, preemptions: int, requests: int) -> None:
    print(f"{setting}: {preemptions} preemptions of {requests} requests")


QUICK = ("no prefix cache", "budget 16", "tight", "tight, not pipelined")
EVERY = [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS if s != "plain"]


@pytest.mark.parametrize("setting", ["plain", *EVERY])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama4", "afm7"))])
def test_greedy_tokens(tiny: Any, judged: Any, theirs: Any, name: str, setting: str) -> None:
    prompts = prompts_of()
    driver = driver_of(tiny(name), setting)
    answers = driver.answers(prompts, TOKENS, ignore_eos=False)
    for prompt, mine in zip(prompts, answers, strict=True):
        gap = disagreement(judged(name)[0], prompt, mine, theirs(name, prompt, TOKENS))
        assert gap is None or gap[1] < NOISE
    stats = driver.core.stats()
    say(setting, stats.preemptions, len(prompts))
    if "tight" in setting:
        assert stats.preemptions >= len(prompts) / 2, "the arena must be too small for this test to say anything"
    assert_nothing_lost(stats)


@pytest.fixture(scope="module")
def sampled(tiny: Any) -> list[list[tuple[int, ...]]]:
    """Four seeded answers to each prompt, one request at a time."""
    driver = driver_of(tiny("llama"), "plain")
    return seeded(driver, prompts_of())


def seeded(driver: Driver, prompts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    handles = [
        driver.add(p, TOKENS, seed=i, n=4, temperature=0.8, top_p=0.9, repetition_penalty=1.1)
        for i, p in enumerate(prompts)
    ]
    driver.finish()
    done = [driver.result(h) for h in handles]
    return [[c.token_ids for c in (first, *first.others)] for first in done]


@pytest.mark.parametrize("setting", EVERY)
def test_seeded_tokens_of_several_answers(tiny: Any, sampled: Any, setting: str) -> None:
    driver = driver_of(tiny("llama"), setting)
    assert seeded(driver, prompts_of()) == sampled
    stats = driver.core.stats()
    say(setting, stats.preemptions, 4 * len(LENGTHS))
    assert_nothing_lost(stats)


@pytest.mark.parametrize("every", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_an_arena_that_grows_and_shrinks_all_the_time(tiny: Any, theirs: Any, every: int) -> None:
    driver = Driver(tiny("llama"), tokens=16_384, max_rows=4, prefill_budget=64)
    prompts = prompts_of()
    long = tokens_of(300, seed=3)
    handles = [driver.add(p, TOKENS) for p in prompts] + [driver.add(long, TOKENS)]
    sizes = set()
    for step in range(10_000):
        if driver.core.idle:
            break
        driver.step()
        sizes.add(driver.core.arena.blocks)
        if step % every == 0:
            driver.core.relieve(True)
    assert len(sizes) > 3, "the arena must have changed its size"
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


@pytest.fixture(scope="module")
def plainly(real: tuple[Any, Any, Any]) -> list[tuple[int, ...]]:
    """The starter model's answers to `real_prompts`, one request at a time."""
    _, _, tokenizer = real
    return plain_driver().answers(real_prompts(tokenizer), 40)


REAL = {
    "quick": ["prefix cache"],
    "all": ["tight", "no prefix cache", "not pipelined", "budget 16", "budget 1024", "tight, not pipelined"],
}


def real_prompts(tokenizer: Any) -> list[list[int]]:
    from support.prompts import prompt_of

    common = prompt_of(tokenizer, 64)
    return [[*common[: n // 2], *prompt_of(tokenizer, n - n // 2, start=n)] for n in (24, 30, 41, 33, 47, 52)]


def real_driver(setting: str) -> Driver:
    tight = {"tokens": 96} if "tight" in setting else {}
    return Driver("smollm2", **({"tokens": 4096, "max_rows": 4, "block_size": 16} | SETTINGS[setting] | tight))


def plain_driver() -> Driver:
    return Driver("smollm2", tokens=4096, block_size=16, **SETTINGS["plain"])


def check_real(real: Any, wanted: Any, setting: str, counts: Sequence[int] = (1, 4)) -> None:
    """As many answers to each prompt as `counts` says, one count after the other, beside the plainest setting's."""
    _, judge, tokenizer = real
    prompts = real_prompts(tokenizer)
    driver = real_driver(setting)
    ties = 0
    for n in counts:
        handles = [driver.add(p, 40, n=n) for p in prompts]
        driver.finish()
        for prompt, handle, theirs in zip(prompts, handles, wanted, strict=True):
            first = driver.result(handle)
            for answer in (first, *first.others):
                gap = disagreement(judge, prompt, answer.token_ids, theirs)
                ties += gap is not None
                assert gap is None or gap[1] < 0.05, f"differs at {gap[0]} by {gap[1]}"
    preemptions = driver.core.stats().preemptions
    say(f"smollm2, {setting} ({ties} ties)", preemptions, sum(counts) * len(prompts))
    assert "tight" not in setting or preemptions > sum(counts) * len(prompts) / 2
    assert_nothing_lost(driver.core.stats())


@pytest.mark.model
@pytest.mark.parametrize("setting", REAL["quick"])
def test_real_weights(real: Any, plainly: Any, setting: str) -> None:
    """One answer each; several at once are among the long tests, and of tiny models above."""
    check_real(real, plainly, setting, (1,))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("setting", [*REAL["quick"], *REAL["all"]])
def test_real_weights_in_every_setting(real: Any, plainly: Any, setting: str) -> None:
    check_real(real, plainly, setting)


def luck_gap(judge: Any, prompt: Sequence[int], mine: int, theirs: int, before: Sequence[int], seed: int) -> float:
    """How far a seed's numbers for the token after `before` lie from what mlx-lm's logits, in float64, give to the two
    candidates: of the distances to a token's group and to the token within it, the greatest.
    """
    logits = np.array(judge(mx.array([[*prompt, *before]]))[0, -1].astype(mx.float32)).astype(np.float64)
    weights = np.exp((logits - logits.max()) / TEMPERATURE)
    groups = np.append(weights, np.zeros(-len(weights) % _SUM_GROUP)).reshape(-1, _SUM_GROUP)
    for_group, for_token = map(float, uniforms(np.array([seed], np.uint64), np.array([len(before)]))[0])
    gaps = []
    for token in (mine, theirs):
        group, place = divmod(token, _SUM_GROUP)
        gaps += [outside(groups.sum(axis=1), group, for_group), outside(groups[group], place, for_token)]
    return max(gaps)


def outside(weights: Any, index: int, number: float) -> float:
    """How far a number lies outside the part of the unit interval that belongs to a weight."""
    ends = np.cumsum(weights) / weights.sum()
    return max(ends[index] - weights[index] / weights.sum() - number, number - ends[index], 0.0)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("setting", ["tight", "prefix cache", "not pipelined", "budget 16"])
def test_real_weights_by_seed(real: Any, setting: str) -> None:
    """Four seeded answers to each prompt are those of the plainest setting, unless the seed's number lies on the
    border between two tokens.
    """
    _, judge, tokenizer = real
    prompts = real_prompts(tokenizer)
    answers = []
    for driver in (real_driver(setting), plain_driver()):
        handles = [driver.add(p, 24, seed=i, n=4, temperature=TEMPERATURE) for i, p in enumerate(prompts)]
        driver.finish()
        firsts = [driver.result(h) for h in handles]
        answers.append([[c.token_ids for c in (first, *first.others)] for first in firsts])
        say(f"smollm2 by seed, {setting}", driver.core.stats().preemptions, 4 * len(prompts))
    different, borders = 0, 0
    for i, prompt in enumerate(prompts):
        for index, (mine, theirs) in enumerate(zip(answers[0][i], answers[1][i], strict=True)):
            different += mine != answers[0][i][0]
            place = next((p for p, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            assert place is not None or len(mine) == len(theirs)
            if place is not None:
                borders += 1
                gap = luck_gap(judge, prompt, mine[place], theirs[place], theirs[:place], seed_of(i, index))
                assert gap < 1e-4, f"answer {index} to prompt {i} differs at token {place} by {gap:.2g}"
    print(f"{borders} answers differ on a border")
    assert different >= 2 * len(prompts), "the answers to one prompt must not be the same"
