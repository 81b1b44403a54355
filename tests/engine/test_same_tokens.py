"""The same tokens whatever the engine does on the way: prefix cache, preemption, forks, token budgets, pipelining, an
arena that grows and shrinks. Greedy tokens are judged by mlx-lm, up to proven ties; seeded ones by the engine's
plainest setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cortexmlx.core.answers import seed_of
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import NOISE, disagreement
from support.engine.same_tokens import LENGTHS, SETTINGS, TEMPERATURE, TOKENS, luck_gap, prompts_of
from support.models.tiny import tokens_of


def driver_of(model: Any, setting: str) -> Driver:
    return Driver(model, **({"tokens": 4096, "max_rows": 4} | SETTINGS[setting]))


def say(setting: str, preemptions: int, requests: int) -> None:
    print(f"{setting}: {preemptions} preemptions of {requests} requests")


QUICK = ("budget 16", "tight, not pipelined")
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
    stats = driver.core.stats()
    say(setting, stats.preemptions, 3 * len(LENGTHS))
    assert_nothing_lost(stats)


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


def check_real(real: Any, wanted: Sequence[tuple[int, ...]], setting: str, counts: Sequence[int] = (1, 4)) -> None:
    """As many answers to each prompt as `counts` says, one count after the other, beside the plainest setting's."""
    _, judge, tokenizer = real
    prompts = real_prompts(tokenizer)
    driver = real_driver(setting)
    ties = 0
    for n in counts:
        handles = [driver.add(p, len(theirs), n=n) for p, theirs in zip(prompts, wanted, strict=True)]
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
def test_real_weights(real: Any, setting: str) -> None:
    """One answer each, over the next block's border; several at once, and longer ones, are among the long tests, and
    of tiny models above.
    """
    check_real(real, plain_driver().answers(real_prompts(real[2]), 18), setting, (1,))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("setting", [*REAL["quick"], *REAL["all"]])
def test_real_weights_in_every_setting(real: Any, plainly: Any, setting: str) -> None:
    check_real(real, plainly, setting)


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
