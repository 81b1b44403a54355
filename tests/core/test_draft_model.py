"""A draft model changes no answer, whatever it guesses and whatever happens to it."""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cortexmlx import Engine, InvalidRequest, ModelCorrupt, ModelNotFound, ModelUnsupported, SamplingParams
from cortexmlx.core import draft_model
from cortexmlx.core.in_process_model import InProcessModel
from cortexmlx.errors import CortexError
from cortexmlx.kv.sizing import format_bytes
from support.drafting.draft_models import make_eager, wide_tiny
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.refusals import Refusals
from support.models.tiny import quantize_in_place, tokens_of, write_tiny

PROMPTS = [tokens_of(n, seed=60 + n) for n in (5, 40, 21, 8)]
SETTINGS: dict[str, Any] = {"tokens": 2048, "max_rows": 3}
GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}


def run(
    driver: Driver, prompts: Sequence[Sequence[int]] = PROMPTS, count: int = 14, **params: Any
) -> list[tuple[int, ...]]:
    """The answers to all prompts; the books of both models are looked at after each step."""
    handles = [driver.add(p, count, seed=i, **params) for i, p in enumerate(prompts)]
    for _ in range(5_000):
        if driver.core.idle:
            break
        driver.core.step()
        driver.core.check_invariants()
    return [driver.result(handle).token_ids for handle in handles]


def with_draft(model: Path, draft: Path | None = None, **settings: Any) -> Driver:
    """A driver whose core has every token guessed by a draft model; None: by the same model."""
    driver = Driver(model, draft=str(draft or model), **(settings or SETTINGS))
    make_eager(driver.core)
    return driver


def counted(driver: Driver) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    counts: Any = driver.core.speculation
    return counts.drafted, counts.accepted


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same tokenizer and other random weights."""
    return write_tiny(tmp_path_factory.mktemp("drafts") / "other", "one layer", seed=5)


FAST = (("windowed llama", GREEDY),)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param(name, params, marks=() if (name, params) in FAST else pytest.mark.slow)
        for name in ("windowed llama", "deepseek_v3")
        for params in (GREEDY, SEEDED)
    ],
)
def test_the_same_tokens_as_without(name: str, params: dict[str, Any], tiny: Any, other: Path) -> None:
    wanted = run(Driver(tiny(name), **SETTINGS), **params)
    wrong = with_draft(tiny(name), other)
    assert run(wrong, **params) == wanted
    drafted, accepted = counted(wrong)
    assert drafted > 30 and accepted < drafted / 4
    own = with_draft(tiny(name))
    assert run(own, **params) == wanted
    drafted, accepted = counted(own)
    if params is GREEDY:
        assert drafted == accepted > 30
        assert own.core.stats().steps < wrong.core.stats().steps / 2
    for driver in (wrong, own):
        assert_nothing_lost(driver.core.stats())
        assert driver.core.draft is not None and driver.core.draft.rows.num_rows == 0


def test_the_models_own_weights_in_four_bits_are_often_right(tmp_path: Path) -> None:
    plain = wide_tiny(tmp_path / "plain")
    driver = with_draft(plain, quantize_in_place(wide_tiny(tmp_path / "draft"), bits=8))
    assert run(driver) == run(Driver(plain, **SETTINGS))
    drafted, accepted = counted(driver)
    assert drafted / 2 < accepted < drafted


def test_sixteen_rows(tiny: Any) -> None:
    prompts = [tokens_of(4 + n, seed=n) for n in range(16)]
    driver = with_draft(tiny("llama"), tokens=2048, max_rows=16, prefill_budget=256)
    assert run(driver, prompts) == run(Driver(tiny("llama"), tokens=2048, max_rows=16), prompts)
    assert driver.core.stats().steps < 10 and counted(driver)[1] > 80
    assert max(sample.rows_running for sample in driver.core.stats().timeline) == 16
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("kv_bits", [pytest.param(8, marks=pytest.mark.slow)])
def test_too_little_memory(kv_bits: int | None, tmp_path: Path) -> None:
    model = wide_tiny(tmp_path / "wide", head_dim=32)
    settings = {"max_rows": 5, "kv_bits": kv_bits}
    prompts = [tokens_of(8 + 3 * n, seed=n) for n in range(5)]
    driver = with_draft(model, tokens=300, **settings)
    assert run(driver, prompts, 60) == run(Driver(model, tokens=1024, **settings), prompts, 60)
    assert counted(driver)[1] > 50 and driver.core.stats().preemptions
    assert_nothing_lost(driver.core.stats())


def test_many_answers_to_one_prompt_share_what_the_draft_model_computes(tiny: Any) -> None:
    driver = with_draft(tiny("llama"))
    handle = driver.add(tokens_of(64), 12, n=4, seed=3, temperature=0.8)
    shared = 0
    while not driver.core.idle:
        driver.core.step()
        assert driver.core.draft is not None
        shared = max(shared, driver.core.draft.rows.cache.stats().shared_blocks)
    assert len(driver.result(handle).others) == 3
    assert shared == 64 // 8


def test_without_a_prefix_cache_its_rows_share_nothing_either(tiny: Any) -> None:
    driver = with_draft(tiny("llama"), prefix_cache=False, **SETTINGS)
    handles = [driver.add(tokens_of(64), 12) for _ in range(3)]
    while not driver.core.idle:
        driver.core.step()
        assert driver.core.draft is not None
        stats = driver.core.draft.rows.cache.stats()
        assert not stats.shared_blocks and not stats.cached_blocks
    assert len({driver.result(handle).token_ids for handle in handles}) == 1 and counted(driver)[1] > 10


def test_cancelled_requests_leave_no_rows(tiny: Any) -> None:
    driver = with_draft(tiny("llama"))
    handles = [driver.add(p, 100) for p in PROMPTS]
    driver.step(8)
    for handle in handles:
        handle.cancel()
        driver.core.cancel(handle.id)
        driver.core.check_invariants()
    driver.finish()
    assert driver.core.draft is not None and driver.core.draft.rows.num_rows == 0
    assert_nothing_lost(driver.core.stats())


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["half written", *(pytest.param(p, marks=pytest.mark.slow) for p in ("collecting", "collected"))]
)
def test_memory_that_is_refused_to_the_draft_model_costs_no_answer(
    place: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "PAUSE", 0.0)
    driver = with_draft(tiny("llama"))
    draft = driver.core.draft
    assert draft is not None
    numbers = iter(range(1000))
    refusals = Refusals(draft, lambda plan: place if next(numbers) in (0, 5, 9) else None)
    assert run(driver, count=40) == run(Driver(tiny("llama"), **SETTINGS), count=40)
    assert refusals.count == draft.refusals == 3 and counted(driver)[1] > 40
    assert driver.core.stats().restarts == 0


def test_memory_that_is_refused_to_the_model_pauses_the_draft_model(tiny: Any) -> None:
    driver = with_draft(tiny("llama"))
    draft = driver.core.draft
    assert draft is not None
    draft._clock = lambda: 0.0
    numbers = iter(range(1000))
    Refusals(driver.core, lambda plan: "before" if next(numbers) == 6 else None)
    assert run(driver) == run(Driver(tiny("llama"), **SETTINGS))
    assert draft.refusals == 1 and not draft.needs_drained_pipeline and draft.rows.num_rows == 0
    assert draft.rows.cache.pools.blocks == (1,)


def test_a_pause_ends_though_nobody_asks_meanwhile(tiny: Any) -> None:
    """Who drafts asks a model only while it wants to be asked."""
    driver, now = with_draft(tiny("llama")), [1000.0]
    draft = driver.core.draft
    assert draft is not None
    draft._clock = lambda: now[0]
    for seconds in (draft_model.PAUSE, 2 * draft_model.PAUSE):
        assert draft.needs_drained_pipeline
        draft.pause()
        now[0] += 0.99 * seconds
        assert not draft.needs_drained_pipeline
        now[0] += 0.01 * seconds
    now[0] += 2 * draft_model.PAUSE
    draft.pause()
    now[0] += draft_model.PAUSE
    assert draft.needs_drained_pipeline, "it is short again after as long a time without a refusal"
    assert run(driver) == run(Driver(tiny("llama"), **SETTINGS)) and counted(driver)[1] > 10


@pytest.mark.parametrize("critical", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_pressure_reaches_the_draft_model(critical: bool, tiny: Any) -> None:
    driver = with_draft(tiny("llama"))
    handles = [driver.add(p, 14, seed=i) for i, p in enumerate(PROMPTS)]
    before = 0
    while not driver.core.idle:
        driver.core.step()
        before = max(before, driver.core.stats().draft_kv_bytes)
        driver.core.relieve(critical)
        driver.core.check_invariants()
        assert not critical or driver.core.stats().draft_kv_bytes == 0
    assert before > 0
    assert [driver.result(h).token_ids for h in handles] == run(Driver(tiny("llama"), **SETTINGS))


@pytest.mark.parametrize("where", ["_schedule_new_tokens", "append_guesses"])
def test_a_draft_model_that_fails_is_left_alone(
    where: str, tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its books are half changed then. Nobody looks at them any more, and its arena is given back."""
    driver = with_draft(tiny("llama"))
    assert driver.core.draft is not None

    rows, calls = driver.core.draft.rows, iter(range(100))
    works = getattr(rows, where)

    def broken(*given: Any) -> Any:
        if next(calls) == 2:
            for follower in rows._draft_rows.values():
                rows.cache.tables.sequences.pop(follower.row.id)
            raise ZeroDivisionError
        return works(*given)

    monkeypatch.setattr(rows, where, broken)
    with caplog.at_level(logging.ERROR, "cortexmlx"):
        assert run(driver) == run(Driver(tiny("llama"), **SETTINGS))
    assert "the draft model failed" in caplog.text and not driver.core.draft.needs_drained_pipeline
    driver.core.relieve(critical=False)
    assert driver.core.tidy() is False and driver.core.stats().draft_kv_bytes == 0


@pytest.mark.slow
def test_after_an_interrupt_both_models_begin_anew(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = with_draft(tiny("llama"))
    for p in PROMPTS:
        driver.add(p, 24)
    driver.step(5)
    driver.core.reset()
    assert driver.core.draft is not None and driver.core.draft.rows.num_rows == 0
    wanted = run(Driver(tiny("llama"), **SETTINGS))
    make_eager(driver.core)
    assert run(driver) == wanted and counted(driver)[1] > 10
    driver.core.fail_all(CortexError("no reason"))
    assert run(driver) == wanted

    with monkeypatch.context() as patch:
        patch.setattr("cortexmlx.kv.arena.can_allocate", lambda size: False)
        driver.core.reset()
    assert driver.core.draft.kv_bytes == driver.core.stats().kv_bytes == 0, "the next steps have the arenas made"
    make_eager(driver.core)
    assert run(driver) == wanted and counted(driver)[1] > 10


@pytest.mark.parametrize("closed", ["while it answers", "while idle"])
def test_a_closed_engine_frees_both_models(closed: str, tiny: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        engine = Engine(tiny("llama"), draft=tiny("llama"), kv_memory="1MB", block_size=8)
        engine.generate(tokens_of(50), SamplingParams(max_tokens=12, ignore_eos=True))
        if closed == "while it answers":
            handle = engine.submit(tokens_of(50), SamplingParams(max_tokens=400, ignore_eos=True))
            next(iter(handle))
        engine.close()
        assert mx.get_active_memory() - before < 1024
    finally:
        gc.enable()


# -- which models -----------------------------------------------------------------------------------------------------


def test_what_is_opened_is_said(tiny: Any, other: Path) -> None:
    with Engine(tiny("llama"), draft=other, kv_memory="1MB") as engine:
        assert engine.info.draft is not None and engine.info.draft.name == str(other)
        assert engine.stats().draft_kv_bytes > 0
        core = engine.inspect(lambda core: (core.cache.tables.capacity_tokens, core.draft.rows.cache))
    assert core[0] == pytest.approx(core[1].tables.capacity_tokens, abs=64)
    assert core[1].bytes_limit < 2**20


@pytest.mark.parametrize("draft", ["/no/such/folder", "no/such-model"])
def test_a_missing_draft_model_is_named(draft: str, tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=f"the draft model {draft}: "):
        Engine(tiny("llama"), draft=draft)


def test_a_damaged_draft_model_is_named(tiny: Any, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny("llama"), tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelCorrupt, match=f"the draft model {damaged}: "):
        Engine(tiny("llama"), draft=damaged)
    with pytest.raises(InvalidRequest, match="draft is 7"):
        Engine(tiny("llama"), draft=7)


def test_a_draft_model_that_cannot_take_back_tokens_is_refused(tiny: Any, tmp_path: Path) -> None:
    gc.collect()
    before = mx.get_active_memory()
    with pytest.raises(ModelUnsupported, match=r"the draft model .*qwen3_5 has recurrent layers"):
        Engine(tiny("llama"), draft=tiny("qwen3_5"))
    assert mx.get_active_memory() - before < 1024


@pytest.mark.parametrize("setting", [{"speculate": False}, {"reproducible": True}])
def test_a_draft_model_that_is_of_no_use_is_said_and_unloaded(setting: dict[str, bool], tiny: Any) -> None:
    """If nothing is to be drafted, it is not even loaded."""
    draft, why = "/no/such/model", "".join(f"{option}={value}" for option, value in setting.items())
    with Engine(tiny("llama"), draft=draft, kv_memory="1MB", **setting) as engine:
        assert engine.info.draft is None
        assert any(f"{draft} is not used" in note and why in note for note in engine.info.notes)
        answer = engine.generate(tokens_of(20), SamplingParams(max_tokens=4, ignore_eos=True))
        assert answer.usage.completion_tokens == 4 and engine.stats().draft_kv_bytes == 0


def test_a_model_on_mlx_lms_own_caches_unloads_its_draft_model(
    tiny: Any, unpaged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessModel, "can_cut_back", True)  # the draft model's
    with Engine(tiny("mamba"), draft=tiny("llama"), kv_memory="1MB") as engine:
        assert engine.info.draft is None
        assert any("is not used" in note and "mlx-lm's own caches" in note for note in engine.info.notes)


def test_the_default_memory_leaves_room_for_the_draft_model(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is nearly filled by the weights of both: half of the rest is for both arenas."""
    from cortexmlx.core import in_process_model

    with Engine(tiny("llama"), draft=tiny("llama"), max_rows=4, kv_memory="1MB") as engine:
        reserved = engine.inspect(lambda core: core.model.reserved_bytes + core.model.draft.reserved_bytes)
    monkeypatch.setattr(in_process_model, "working_set_bytes", lambda: reserved + 2**20)
    with Engine(tiny("llama"), draft=tiny("llama"), max_rows=4) as engine:
        limits = engine.inspect(lambda core: (core.cache.bytes_limit, core.draft.rows.cache.bytes_limit))
    assert 2**18 - 2**14 < limits[0] == limits[1] <= 2**18, format_bytes(limits[0])


def test_it_knows_how_long_its_rounds_take(tiny: Any) -> None:
    driver = with_draft(tiny("llama"))
    assert driver.core.draft is not None and driver.core.draft.estimate_seconds(1, 4) is None
    run(driver)
    one, four = (driver.core.draft.estimate_seconds(1, tokens) for tokens in (1, 4))
    assert one is not None and four is not None and 0 < one <= four < 10
