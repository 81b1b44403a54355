"""Selective KV in a whole engine: texts go on beyond the arena and the context, and every token is the one that mlx-lm
chooses for the tokens that are kept, whatever the engine does on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.core import EngineCore
from cortexmlx.errors import InvalidRequest
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import NOISE
from support.engine.logits import answers_with_logits, mlx_lms_logits
from support.models.quantized_models import assert_rounded, loaded, wide
from support.models.recurrent import RECURRENT
from support.models.tiny import CONFIGS, tokens_of, write_tiny

FIRST, LAST = 5, 22
MOST = FIRST + 2 * LAST
TOKENS = 100
slow = pytest.mark.slow


def texts(prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """What a row reads from position 0, and the tokens that it answers, before it must drop some again."""
    text, rest, each = list(prompt), list(answer), []
    while rest:
        while len(text) > MOST:
            text = text[:FIRST] + text[FIRST + LAST :]
        part, rest = rest[: MOST + 1 - len(text)], rest[MOST + 1 - len(text) :]
        each.append((text, part))
        text = text + part
    return each


def kept_logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """mlx-lm's logits before each token of an answer, with the same tokens kept at the same positions."""
    return np.concatenate([mlx_lms_logits(model, text, part) for text, part in texts(prompt, answer)])


def prompts_of() -> list[list[int]]:
    """Two that begin alike, one that is too long by itself, one that is longer than the arena and the context."""
    return [tokens_of(9, seed=1), [*tokens_of(9, seed=1), *tokens_of(30, seed=2)], tokens_of(70), tokens_of(700)]


QUICK = ("llama", "windowed llama", "lfm2")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in (*CONFIGS, *RECURRENT)])
def test_the_logits_are_mlx_lms_for_the_tokens_that_are_kept(name: str, tiny: Any, judged: Any) -> None:
    driver = Driver(tiny(name), tokens=400, keep_first=FIRST, keep_last=LAST)
    prompts = prompts_of()
    for prompt, (answer, mine) in zip(prompts, answers_with_logits(driver, prompts, TOKENS), strict=True):
        wanted = kept_logits(judged(name)[0], prompt, answer)
        np.testing.assert_allclose(mine, wanted, atol=NOISE * max(1.0, float(np.abs(wanted).max()) / 10))
    assert len(texts(prompts[0], range(TOKENS))) > 3, "this test must drop again and again"
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("keep_last", [11, 60])
def test_what_is_kept_fits_the_usual_memory_of_one_row(name: str, keep_last: int, tiny: Any) -> None:
    core = EngineCore(EngineConfig(str(tiny(name)), max_rows=1, keep_first=FIRST, keep_last=keep_last))
    assert core.stats().keep_last == keep_last
    core.release()


@pytest.mark.parametrize("name", ["llama", pytest.param("mamba", marks=slow), pytest.param("gemma2", marks=slow)])
def test_on_mlx_lms_own_caches_too(name: str, tiny: Any, judged: Any, unpaged: None) -> None:
    driver = Driver(tiny(name), tokens=64, keep_first=FIRST, keep_last=LAST)
    prompt = tokens_of(30, seed=4)
    ((answer, mine),) = answers_with_logits(driver, [prompt], TOKENS)
    np.testing.assert_allclose(mine, kept_logits(judged(name)[0], prompt, answer), atol=NOISE)
    assert driver.core.stats().attention_backend == "mlx-lm's own" and driver.core.stats().dropped_tokens > LAST


@slow
@pytest.mark.parametrize("bits", [8, 4])
def test_with_quantized_keys_and_values(bits: int, tmp_path: Path) -> None:
    """Judged text by text by mlx-lm on rounding caches."""
    folder, prompt = wide(tmp_path, "llama"), tokens_of(30, seed=4)
    driver = Driver(folder, tokens=104, kv_bits=bits, keep_first=FIRST, keep_last=LAST)
    answer, group = driver.result_of(prompt, TOKENS).token_ids, driver.core.stats().kv_group_size
    model = loaded(folder)[0]
    assert group is not None and driver.core.stats().dropped_tokens > 2 * LAST
    for text, part in texts(prompt, answer):
        assert_rounded(model, text, part, len(part), bits, group)


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_rows": 1},
    "tight": {"tokens": 104, "max_rows": 8},
    "tight without prefix cache": {"tokens": 104, "max_rows": 8, "prefix_cache": False},
    "budget 7": {"prefill_budget": 7},
    "not pipelined": {"pipeline": False},
    "big blocks": {"block_size": 64, "tokens": 512},
    "no blocks to spare": {"tokens": 56, "max_rows": 8},
}


@pytest.fixture(scope="module")
def plainly(tiny: Any) -> Any:
    """The answers of an engine with plenty of memory, one after the other."""
    driver = Driver(tiny("llama"), tokens=2048, max_rows=1, prefix_cache=False, keep_first=FIRST, keep_last=LAST)
    return seeded(driver)


def seeded(driver: Driver) -> list[tuple[int, ...]]:
    asked = {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.3}
    handles = [driver.add(p, 50, seed=i, n=2, **asked) for i, p in enumerate(prompts_of())]
    driver.finish()
    driver.core.check_invariants()
    return [c.token_ids for h in handles for first in [driver.result(h)] for c in (first, *first.others)]


@pytest.mark.parametrize("setting", [s if s == "tight" else pytest.param(s, marks=slow) for s in SETTINGS])
def test_the_same_tokens_whatever_the_engine_does_on_the_way(setting: str, tiny: Any, plainly: Any) -> None:
    driver = Driver(tiny("llama"), **({"tokens": 1024, "keep_first": FIRST, "keep_last": LAST} | SETTINGS[setting]))
    assert seeded(driver) == plainly
    assert driver.core.stats().preemptions >= 3 or not {"tight", "spare"} & set(setting.split())
    assert_nothing_lost(driver.core.stats())


def test_a_turn_behind_an_answer_that_dropped_finds_what_is_left_and_nothing_else(tiny: Any) -> None:
    """The whole conversation is the prompt, as a chat sends it."""
    keep = {"keep_first": FIRST, "keep_last": LAST}
    kept, plain = (Driver(tiny("llama"), tokens=512, prefix_cache=p, **keep) for p in (True, False))
    text, found = tokens_of(20, seed=6), []
    for turn in range(6):
        one, other = (driver.result_of(text, 25) for driver in (kept, plain))
        assert one.token_ids == other.token_ids
        assert one.usage.prompt_tokens == len(text) and one.usage.dropped_tokens % LAST == 0
        found.append(one.usage.cached_tokens)
        text = [*text, *one.token_ids, *tokens_of(4, seed=turn)]
    assert len(text) > 3 * MOST and max(found[2:]) > FIRST + LAST, "a turn goes on with what the last one computed"
    whole = Driver(tiny("llama"), tokens=512, prefix_cache=True)
    assert kept.result_of(text[: MOST - 4], 3).token_ids == whole.result_of(text[: MOST - 4], 3).token_ids


def test_what_is_dropped_is_said(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=64, max_rows=1, keep_first=FIRST, keep_last=LAST)
    prompt = tokens_of(MOST + 1)
    handle = driver.add(prompt, 40)
    driver.finish()
    events = list(handle)
    usage = driver.result(handle).usage
    told = [(place, event.dropped) for place, event in enumerate(events) if event.dropped]
    assert told == [(0, LAST), (LAST, LAST)]
    stats = driver.core.stats()
    assert (stats.keep_first, stats.keep_last, stats.dropped_tokens) == (FIRST, LAST, 2 * LAST)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.dropped_tokens) == (MOST + 1, 40, 2 * LAST)
    driver.add(prompt, 400)
    driver.step(60)
    dropped = len(driver.core.scheduler.jobs[0].dropped_tokens)
    assert (
        dropped and f"of at most {MOST + 401} tokens, 16 cached, {dropped} dropped" in driver.core.stats().sequences[0]
    )
    off = Driver(tiny("llama"), tokens=64).core.stats()
    assert (off.keep_first, off.keep_last, off.dropped_tokens) == (None, None, 0)


def test_a_row_that_could_not_have_so_many_tokens_is_refused_with_the_numbers(tiny: Any) -> None:
    with pytest.raises(
        InvalidRequest, match="the KV cache holds 64: make keep_last at most 30, or raise the KV memory"
    ):
        Driver(tiny("llama"), tokens=64, keep_last=31)
    with pytest.raises(InvalidRequest, match="the model's context has 512: make keep_last at most 254"):
        Driver(tiny("llama"), tokens=4096, keep_last=255)
    assert EngineConfig("a model", keep_last=7).keep == EngineConfig("a model", keep_first=4, keep_last=7).keep


@pytest.mark.parametrize(("arena", "count"), [(96, 300), pytest.param(2048, 20_000, marks=slow)])
def test_memory_is_flat_however_long_the_answer_is(arena: int, count: int, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "one layer", max_position_embeddings=arena)
    driver = Driver(model, tokens=arena, max_rows=1, prefill_budget=512, keep_last=(arena - 4) // 2)
    handle = driver.add(tokens_of(30), count)
    peaks, longest, sizes = [], 0, set()
    for step in range(2 * count):
        if driver.core.idle:
            break
        driver.step()
        longest = max(
            [
                longest,
                *(driver.core.cache.tables.length(job.id) for job in driver.core.scheduler.jobs if job.is_running),
            ]
        )
        if step % (count // 10) == 0:
            peaks.append(mx.get_peak_memory())
            sizes.add(driver.core.runner.arena.nbytes)
    done = driver.result(handle)
    print(
        f"{count} tokens, {done.usage.dropped_tokens} dropped; "
        f"peak {peaks[3]} bytes after a third, {peaks[-1]} in the end"
    )
    assert len(done.token_ids) == count and longest == arena
    assert max(sizes) == driver.core.runner.arena.nbytes <= arena * driver.core.info.kv_bytes_per_token * 1.2
    assert peaks[-1] < 1.01 * peaks[3], "no more than after the first drops"
    assert_nothing_lost(driver.core.stats())


@slow
@pytest.mark.model
def test_the_starter_model_goes_on_with_what_it_keeps() -> None:
    """Greedy tokens, judged by mlx-lm text by text, up to proven ties."""
    from cortexmlx import Engine, SamplingParams
    from cortexmlx.models import load_model

    starter = load_model("smollm2")
    prompt = starter.tokenizer.encode("Once upon a time, in a small house by the sea,")
    with Engine("smollm2", kv_memory="16MB", max_rows=2, keep_first=FIRST, keep_last=LAST) as engine:
        answers = engine.generate_batch([prompt, prompt * 9], SamplingParams(max_tokens=70, ignore_eos=True))
        assert engine.stats().dropped_tokens >= 5 * LAST
    for asked, answer in zip((prompt, prompt * 9), answers, strict=True):
        for text, part in texts(asked, answer.token_ids):
            wanted = mlx_lms_logits(starter.model, text, part)
            assert (wanted.max(axis=1) - wanted[np.arange(len(part)), list(part)]).max() < NOISE
