"""The disk tier through the engine's core: what was computed once is read by the next engine, with the same tokens."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.types.request import RequestState
from support.engine.core_driver import Driver
from support.engine.judge import assert_same
from support.models.quantized_models import wide
from support.models.recurrent import RECURRENT
from support.models.tiny import tokens_of
from support.patience import PATIENCE
from support.store.damage import DAMAGES
from support.store.stored import Stored, reading_pays

LONG = tokens_of(90, seed=4)
"""A prompt of eleven whole blocks and a part."""


def check_restarts(name: str, opened: Callable[[], Stored], judged: Any, theirs: Any) -> None:
    """Ask repeats, longer prompts, and one that parts in the middle, each of an engine of its own, all of them twice.
    mlx-lm's own cache is the judge of all tokens.
    """
    prompts: Sequence[list[int]] = [
        LONG,
        [*LONG, *tokens_of(12, seed=1)],
        [*LONG[:50], *tokens_of(30, seed=2)],
    ]
    found = []
    for _ in range(2):
        for prompt in prompts:
            with opened() as driver:
                answer, cached = driver.ask(prompt)
                driver.core.check_invariants()
            assert_same(judged(name)[0], prompt, answer, theirs(name, prompt, 10))
            found.append(cached)
    parts = 48 if name not in RECURRENT else 0  # no state was kept there
    assert found == [0, 88, parts, 88, 96, 72]


KINDS = ["llama", "windowed llama", "gemma3_text", "gpt_oss", "deepseek_v3", "llama4", "gemma3n", "lfm2", "qwen3_next"]
FEW = ("llama", "gemma3_text", "lfm2")
EVERY = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]


@pytest.fixture(autouse=True)
def _reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    reading_pays(monkeypatch)


@pytest.mark.parametrize("name", EVERY)
def test_the_next_engine_computes_only_what_is_not_in_whole_blocks(
    name: str, tiny: Any, judged: Any, theirs: Any, tmp_path: Path
) -> None:
    check_restarts(name, lambda: Stored(tiny(name), tmp_path), judged, theirs)


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_quantized_blocks_come_back_and_are_nobody_elses(bits: int, tmp_path: Path) -> None:
    """The tokens are those of an engine that quantizes and has no store; another number of bits finds nothing."""
    model = wide(tmp_path / "models", "llama")
    right = list(Driver(model, kv_bits=bits).answers([LONG], 10)[0])
    with Stored(model, tmp_path / "kv", kv_bits=bits) as driver:
        assert driver.ask(LONG) == (right, 0)
    with Stored(model, tmp_path / "kv") as driver:
        assert driver.ask(LONG)[1] == 0
    with Stored(model, tmp_path / "kv", kv_bits=bits) as driver:
        assert driver.ask(LONG) == (right, 88)


def test_who_may_not_reuse_all_that_was_found_computes_it(tiny: Any, theirs: Any, tmp_path: Path) -> None:
    """A text that ends within what another one waits for, and one whose log-probabilities are asked for."""
    whole = LONG[:88]
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
        driver.forget()
        first = driver.add(LONG, 10)
        driver.step()
        assert driver.core.idle, "it is read"
        second = driver.add(whole, 10, priority=9)
        scored = driver.add(LONG, 10, prompt_logprobs=0, priority=5)
        driver.finish()
        cached = [driver.result(h).usage.cached_tokens for h in (first, second, scored)]
        assert (cached[0], cached[2]) == (88, 0) and 80 <= cached[1] < 88
        assert list(driver.result(second).token_ids) == theirs("llama", whole, 10)
        for handle in (first, scored):
            assert list(driver.result(handle).token_ids) == theirs("llama", LONG, 10)
        told = driver.result(scored).prompt_logprobs
    alone = Driver(tiny("llama")).result_of(LONG, 1, prompt_logprobs=0).prompt_logprobs
    assert told is not None and alone is not None and told.tokens == alone.tokens
    np.testing.assert_allclose(told.logprobs, alone.logprobs, atol=1e-4)


def test_a_text_that_left_memory_is_read_while_others_decode(tiny: Any, theirs: Any, tmp_path: Path) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
        driver.forget()
        other = driver.add(tokens_of(9, seed=8), 60)
        driver.step(4)
        answer, cached = driver.ask(LONG)
        assert (answer, cached) == (theirs("llama", LONG, 10), 88)
        assert list(driver.result(other).token_ids) == theirs("llama", tokens_of(9, seed=8), 60)
        assert driver.counts.read_blocks == 11


def test_those_who_begin_alike_read_once(tiny: Any, theirs: Any, tmp_path: Path) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
        driver.forget()
        prompts = [[*LONG, *tokens_of(5, seed=s)] for s in range(4)]
        assert [list(a) for a in driver.answers(prompts, 10)] == [theirs("llama", p, 10) for p in prompts]
        assert driver.counts.read_blocks == 11
        driver.core.check_invariants()


def test_new_prompts_that_come_together_begin_together(tiny: Any, tmp_path: Path) -> None:
    """What is not on disk waits for nobody to say so."""
    with Stored(tiny("llama"), tmp_path, prefill_budget=512) as driver:
        driver.ask(LONG)
        driver.forget()
        missed = driver.counts.missed_blocks  # LONG, if it came before the store was open
        handles = [driver.add(tokens_of(40, seed=s), 10) for s in range(4)]
        driver.step()
        assert driver.core.scheduler.rows_running == 4
        driver.finish()
        assert all(len(driver.result(handle).token_ids) == 10 for handle in handles)
        assert driver.counts.missed_blocks == missed


def test_clients_do_not_find_each_others_texts_on_disk(tiny: Any, tmp_path: Path) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG, client="a")
    with Stored(tiny("llama"), tmp_path) as driver:
        assert driver.ask(LONG, client="b")[1] == driver.ask(LONG)[1] == 0
        assert driver.ask(LONG, client="a")[1] == 88


def test_another_model_block_size_or_folder_finds_nothing(tiny: Any, theirs: Any, tmp_path: Path) -> None:
    with Stored(tiny("llama"), tmp_path / "one") as driver:
        driver.ask(LONG)
    others = [("qwen3", "one", {}), ("llama", "one", {"block_size": 16}), ("llama", "two", {})]
    for name, folder, config in others:
        with Stored(tiny(name), tmp_path / folder, **config) as driver:
            assert driver.ask(LONG) == (theirs(name, LONG, 10), 0)


def test_changed_weights_under_the_same_name_find_nothing(tiny: Any, tmp_path: Path) -> None:
    """Nothing of the file says so: its name, its size and its time are what they were."""
    import os

    import mlx.core as mx

    model = tmp_path / "model"
    shutil.copytree(tiny("llama"), model)
    with Stored(model, tmp_path / "store") as driver:
        driver.ask(LONG)
    (weights,) = model.glob("*.safetensors")
    before = weights.stat()
    arrays = mx.load(str(weights))
    assert isinstance(arrays, dict)
    name = next(n for n in arrays if "k_proj" in n)
    arrays[name] = arrays[name] * 1.001
    mx.save_safetensors(str(weights), arrays, {"format": "mlx"})
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with Stored(model, tmp_path / "store") as driver:
        assert driver.ask(LONG)[1] == 0


def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_nothing(tiny: Any, theirs: Any, tmp_path: Path) -> None:
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
        driver.forget()
        handle, other = driver.add(LONG, 10), driver.add([*LONG, 5], 10)
        driver.core.step()
        assert driver.core.idle and len(driver.core.scheduler.jobs) == 2, "both wait for what is read"
        driver.core.cancel(handle.id)
        driver.finish()
        assert handle.state is RequestState.CANCELLED
        assert list(driver.result(other).token_ids) == theirs("llama", [*LONG, 5], 10)
        driver.core.check_invariants()
        assert driver.core.cache.stats().used_blocks == 0


def test_a_step_that_fails_forgets_what_it_was_to_load(tiny: Any, theirs: Any, tmp_path: Path) -> None:
    from cortexmlx.errors import CortexError

    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
        driver.forget()
        driver.add(LONG, 10)
        driver.core.step()
        driver.calls.get(timeout=PATIENCE)(driver.core)
        plan = driver.core.scheduler.plan(0)
        assert plan is not None and len(plan.loads) == 11
        driver.core.fail_all(CortexError("as if the step had failed"))
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 88), "it is read again"


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_what_is_preempted_and_evicted_comes_back_right(
    name: str, tiny: Any, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena holds two of four texts. All that waits is copied between two steps, so a busy machine drops no more."""
    monkeypatch.setattr("cortexmlx.disk.connector.COPY_SHARE", 1e9)
    monkeypatch.setattr("cortexmlx.disk.connector._STEP_SHARE", 1e9)
    prompts = [tokens_of(70, seed=s) for s in range(4)]
    with Stored(tiny(name), tmp_path, tokens=200) as driver:
        for _ in range(2):
            assert [list(a) for a in driver.answers(prompts, 20, ignore_eos=False)] == [
                theirs(name, p, 20) for p in prompts
            ]
            driver.rest()
            driver.core.check_invariants()
        assert driver.counts.read_blocks > 10


def test_reading_that_is_slower_than_computing_is_not_done(
    tiny: Any, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortexmlx.disk.tier._READING_SECONDS", 0.001)
    with Stored(tiny("llama"), tmp_path) as driver:
        driver.ask(LONG)
        driver.forget()
        driver.core.scheduler.cost_model.seconds_per_token = 1e-9
        assert driver.ask(LONG) == (theirs("llama", LONG, 10), 0)
        assert driver.counts.read_blocks == 0


def test_without_a_prefix_cache_or_blocks_there_is_no_store(tiny: Any, tmp_path: Path, unpaged: None) -> None:
    driver = Driver(tiny("llama"), kv_store=tmp_path / "store")
    assert driver.core.disk is None and "KV store" in driver.core.info.notes[-1]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["file/store", "a\0b"])
def test_a_folder_that_cannot_be_written_is_one_warning_and_a_note(
    name: str, tiny: Any, theirs: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    driver = Driver(tiny("llama"), kv_store=tmp_path / name)
    assert list(driver.answers([LONG], 10)[0]) == theirs("llama", LONG, 10)
    assert "kv_store cannot be used: " in driver.core.info.notes[-1]
    driver.core.release()
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage().encode(), "any log can write it"


def test_a_relative_folder_stays_where_it_was(
    tiny: Any, theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An app goes to another folder while its engine is open: daemons do, and notebooks."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Stored(tiny("llama"), Path("store")) as driver:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert driver.ask(LONG)[0] == theirs("llama", LONG, 10)
        driver.forget()
        assert driver.ask(LONG)[1] > 0, "it is read"
    assert not list((tmp_path / "elsewhere").iterdir()) and not caplog.records


def attack(model: Path, folder: Path, damages: int, seed: int, answers: dict[int, list[int]], caplog: Any) -> int:
    """Damage a store between two prompts, while it is open, and in between engines; returns how many blocks were read
    all the same.
    """
    chance, read = random.Random(seed), 0
    prompts = {s: [*LONG[: 40 + 10 * (s % 4)], *tokens_of(30, seed=s)] for s in answers}
    while damages > 0:
        caplog.clear()
        with Stored(model, folder) as driver:
            for _ in range(min(10, damages)):
                damages -= 1
                for text in chance.sample(sorted(prompts), 2):
                    assert driver.ask(prompts[text])[0] == answers[text], "a wrong token"
                driver.forget()
                chance.choice(DAMAGES)(chance, folder)
            driver.core.check_invariants()
            read += driver.counts.read_blocks
        warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warnings) <= 1, warnings
    return read


@pytest.mark.parametrize("damages", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_damaged_store_is_never_a_wrong_token(
    damages: int, tiny: Any, theirs: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {s: [*LONG[: 40 + 10 * (s % 4)], *tokens_of(30, seed=s)] for s in range(6)}
    answers = {s: theirs("llama", prompt, 10) for s, prompt in prompts.items()}
    assert attack(tiny("llama"), tmp_path, damages, damages, answers, caplog) > damages
