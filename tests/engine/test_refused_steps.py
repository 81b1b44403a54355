"""Memory that MLX refuses in the middle of a step: requests begin again with what they have, and get the tokens that
they would have got; one that does not fit fails by itself, and the engine goes on.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import OutOfMemory
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.shortage import STEPS_TO_RELAX
from cortexmlx.types.request import RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.planted import ERRORS, TEXT, Day, Kind, Plan, kind_of
from support.engine.planted import KINDS as DAYS
from support.engine.refusals import PLACES, SAID, Refusals
from support.models.tiny import tokens_of
from support.patience import PATIENCE

KINDS = ("llama", "windowed llama", "deepseek_v3", "lfm2")
"""All tokens seen, a window, latents, recurrent states beside attention."""

PROMPTS = [tokens_of(n, seed=60 + n) for n in (30, 9, 50, 21, 30, 70)]


def run(driver: Driver, max_tokens: int = 24, **params: Any) -> list[tuple[int, ...] | None]:
    """The answers to all prompts, two of which come late; the books are looked at after each step. None for those that
    failed for memory."""
    handles = [driver.add(p, max_tokens, seed=i, **params) for i, p in enumerate(PROMPTS[:4])]
    for _ in range(12):
        driver.step()
        driver.core.check_invariants()
    handles += [driver.add(p, max_tokens, seed=i, **params) for i, p in enumerate(PROMPTS[4:], 4)]
    for _ in range(5_000):
        if driver.core.idle:
            break
        driver.core.step()
        driver.core.check_invariants()
    return [None if handle.state is RequestState.FAILED else driver.result(handle).token_ids for handle in handles]


def at(steps: dict[int, str]) -> Any:
    """Refuses at the steps of these numbers, counted as they are dispatched."""
    numbers = iter(range(1_000_000))
    return lambda plan: steps.get(next(numbers))


FAST = {("llama", "half written"), ("windowed llama", "collected"), ("deepseek_v3", "before"), ("lfm2", "under way")}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(name, place, marks=() if (name, place) in FAST else pytest.mark.slow)
        for name in KINDS
        for place in PLACES
    ],
)
def test_a_refused_step_costs_nobody_a_token(name: str, place: str, tiny: Any) -> None:
    """A prompt's first piece, one beside decoding rows, steps of windows, a flush."""
    settings = {"tokens": 256, "max_rows": 3, "prefill_budget": 24}
    wanted = run(Driver(tiny(name), **settings))
    driver = Driver(tiny(name), **settings)
    refusals = Refusals(driver.core, at(dict.fromkeys((0, 3, 7, 12, 25, 40), place)))
    assert run(driver) == wanted
    assert refusals.count == 6
    driver.core.relieve(True)
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize(
    "place", ["half written", "collecting", *(pytest.param(p, marks=pytest.mark.slow) for p in PLACES)]
)
def test_a_refused_step_of_a_model_that_runs_alone(place: str, tiny: Any, theirs: Any, unpaged: None) -> None:
    driver = Driver(tiny("llama"), prefill_budget=24)
    Refusals(driver.core, at(dict.fromkeys((0, 4, 9, 31), place)))
    assert run(driver, 12) == [tuple(theirs("llama", p, 12)) for p in PROMPTS]


def test_a_request_that_is_refused_again_and_again_fails_by_itself(tiny: Any, theirs: Any) -> None:
    """Whoever computes the piece of 70 tokens is refused, however small it is cut."""
    driver = Driver(tiny("llama"), tokens=1024, max_rows=4, prefill_budget=512)
    long = len(PROMPTS[5])
    Refusals(
        driver.core,
        lambda plan: "half written" if any(s.count > 1 and s.first + s.count == long for s in plan.segments) else None,
    )
    handles = [driver.add(p, 20) for p in PROMPTS]
    driver.finish()
    for prompt, handle in zip(PROMPTS[:5], handles, strict=False):
        assert list(driver.result(handle).token_ids) == theirs("llama", prompt, 20)
    with pytest.raises(
        OutOfMemory, match=r"70 tokens, was refused memory.*\[malloc\] Unable to allocate 1048576 bytes"
    ):
        driver.result(handles[5])
    driver.core.check_invariants()
    assert driver.answers([PROMPTS[0]], 20) == [tuple(theirs("llama", PROMPTS[0], 20))]


def test_when_every_step_is_refused_every_request_has_an_end(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("llama"), tokens=1024, max_rows=4)
    refusals = Refusals(driver.core, lambda plan: "under way")
    handles = [driver.add(p, 20) for p in PROMPTS] + [driver.add(PROMPTS[1], 20, n=3, temperature=1.0)]
    driver.finish()
    for handle in handles:
        with pytest.raises(OutOfMemory):
            driver.result(handle)
    assert refusals.count <= 3 * 9, "each of nine answers is tried three times at most, the last time alone"
    refusals._where = lambda plan: None
    assert driver.answers([PROMPTS[0]], 20) == [tuple(theirs("llama", PROMPTS[0], 20))]
    assert_nothing_lost(driver.core.stats())


def test_fewer_rows_run_after_a_refusal_and_all_of_them_later(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=2048, max_rows=4, prefill_budget=256)
    Refusals(driver.core, at({6: "under way"}))
    for i in range(8):
        driver.add(tokens_of(9, seed=i), 150)
    most = []
    while not driver.core.idle:
        driver.step()
        most.append(driver.core.scheduler.rows_running)
    assert max(most[8:60]) == 2
    assert 4 in most[STEPS_TO_RELAX + 8 :]


def test_a_refusal_gives_the_arena_back(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=8192)
    driver.answers([tokens_of(400, seed=i) for i in range(8)], 4)
    before = driver.core.stats()
    Refusals(driver.core, at({2: "collecting"}))
    driver.answers([tokens_of(30, seed=9)], 20)
    after = driver.core.stats()
    assert before.cached_blocks > 300
    assert after.total_blocks < 16 and after.kv_bytes < before.kv_bytes / 16
    assert after.kv_bytes_limit == before.kv_bytes_limit, "it may grow again"


def test_what_is_refused_between_steps_is_no_end_either(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny("lfm2"), tokens=512)
    wanted = driver.answers([PROMPTS[0]], 12)
    with monkeypatch.context() as patch:

        def refused(ops: Any) -> None:
            raise RuntimeError(SAID)

        patch.setattr(driver.core.runner.states, "carry_out", refused)
        driver.core.tidy()
    driver.core.check_invariants()
    assert driver.answers([PROMPTS[0]], 12) == wanted


def test_through_the_engine_with_answers_that_share_a_prompt(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, n=3, seed=5)

    def answers(refuse: bool) -> list[tuple[int, ...]]:
        with Engine(tiny("llama"), kv_memory="256KB", block_size=8, max_rows=4, prefill_budget=32) as engine:
            if refuse:
                engine.inspect(lambda core: Refusals(core, at({3: "half written", 9: "collected", 24: "before"})))
            done = engine.submit(PROMPTS[2], asked).result(PATIENCE)
            engine.check_invariants()
            return [answer.token_ids for answer in (done, *done.others)]

    assert answers(True) == answers(False)
    assert "memory was refused" in caplog.text


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("llama", 1), ("lfm2", 1), *(pytest.param(name, 40, marks=pytest.mark.slow) for name in (*KINDS, "gemma3_text"))],
)
def test_refusals_at_random_steps(name: str, seeds: int, tiny: Any) -> None:
    """200 in all, in the slow ones: five in each run."""
    settings = {"tokens": 224, "max_rows": 3, "prefill_budget": 24}
    wanted = run(Driver(tiny(name), **settings))
    refused = failed = 0
    for seed in range(seeds):
        chance = random.Random(seed)
        steps = {chance.randrange(60): chance.choice(PLACES) for _ in range(5)}
        driver = Driver(tiny(name), **settings)
        refusals = Refusals(driver.core, at(steps))
        answers = run(driver)
        assert all(a in (None, b) for a, b in zip(answers, wanted, strict=True)), f"seed {seed}: {steps}"
        failed += answers.count(None)
        driver.core.relieve(True)
        assert_nothing_lost(driver.core.stats())
        refused += refusals.count
    assert refused > 3 * seeds
    assert failed <= 0.03 * len(wanted) * seeds, "who is refused three times by chance, and comes no farther"


@pytest.mark.parametrize("place", ["half written", pytest.param("collected", marks=pytest.mark.slow)])
def test_what_is_pinned_or_goes_to_the_store_is_not_trusted_either(
    place: str, tiny: Any, theirs: Any, tmp_path: Path
) -> None:
    """Nothing that lay beside a failed write is found again: not under a pin, nor by an engine that begins anew."""
    asked = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    wanted = [theirs("llama", prompt, 12) for prompt in PROMPTS]

    def answers(engine: Engine) -> list[list[int]]:
        handles = [engine.submit(prompt, asked) for prompt in PROMPTS]
        return [list(handle.result(PATIENCE).token_ids) for handle in handles]

    settings: Any = {"kv_memory": "256KB", "block_size": 8, "max_rows": 3, "prefill_budget": 24}
    with Engine(tiny("llama"), kv_store=tmp_path / "store", **settings) as engine:
        engine.inspect(lambda core: core.pin(PROMPTS[2], None))
        assert answers(engine) == wanted
        refusals = engine.inspect(lambda core: Refusals(core, at({1: place, 9: place})))
        for _ in range(2):
            assert answers(engine) == wanted
            engine.check_invariants()
        assert refusals.count == 2
    with Engine(tiny("llama"), kv_store=tmp_path / "store", **settings) as engine:
        assert answers(engine) == wanted


@pytest.mark.parametrize(("short", "failed"), [(2, 0), (5, 1), (10_000, 4)])
def test_an_arena_that_was_given_back_and_cannot_be_had_again_fails_only_who_waits_for_it(
    short: int, failed: int, tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is short for so many steps; then the engine goes on as before."""
    driver, steps, short_until = Driver(tiny("llama"), tokens=4096), [0], [0]
    monkeypatch.setattr("cortexmlx.kv.arena.can_allocate", lambda size: steps[0] >= short_until[0])

    def where(plan: StepPlan) -> str | None:
        steps[0] += 1
        short_until[0] = 7 + short if steps[0] == 7 else short_until[0]
        return "half written" if steps[0] == 7 else None

    Refusals(driver.core, where)
    handles = [driver.add(p, 40) for p in PROMPTS[:4]]
    driver.finish()
    assert [handle.state for handle in handles].count(RequestState.FAILED) == failed
    for prompt, handle in zip(PROMPTS, handles, strict=False):
        if handle.state is RequestState.FAILED:
            with pytest.raises(OutOfMemory, match=r"the system refuses .* for the KV cache"):
                driver.result(handle)
        else:
            assert list(driver.result(handle).token_ids) == theirs("llama", prompt, 40)
    steps[0] = short_until[0]
    assert driver.answers([PROMPTS[0]], 40) == [tuple(theirs("llama", PROMPTS[0], 40))]
    assert_nothing_lost(driver.core.stats())


def test_what_was_given_back_may_be_had_again_later(tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for a few blocks alone, and answers end where those are full; then there is more again."""
    driver, most, long = Driver(tiny("llama"), tokens=4096), [1 << 40], tokens_of(200, seed=1)
    monkeypatch.setattr("cortexmlx.kv.arena.can_allocate", lambda size: size < most[0])

    def where(plan: StepPlan) -> str | None:
        if plan.number != 6:
            return None
        most[0] = 30_000
        return "under way"

    before = driver.core.stats().total_blocks
    Refusals(driver.core, where)
    handles = [driver.add(p, 40) for p in PROMPTS[:4]]
    driver.finish()
    held = driver.core.cache.tables.capacity_tokens
    assert held < len(long)
    for prompt, handle in zip(PROMPTS, handles, strict=False):
        answer = driver.result(handle).token_ids
        assert answer == tuple(theirs("llama", prompt, 40))[: len(answer)]
    most[0] = 1 << 40
    assert driver.answers([long], 40) == [tuple(theirs("llama", long, 40))]
    assert driver.core.cache.pools.max_blocks[0] >= before > held // 8


def test_who_is_refused_once_on_the_way_back_is_not_cut_short(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena that a refusal took is refused once itself, at each of its sizes, when nobody could know before."""
    for at_size in range(5):
        driver = Driver(tiny("llama"), tokens=1024, max_rows=4, prefill_budget=64)
        Refusals(driver.core, at({4: "under way"}))
        bring, sizes = driver.core.runner.arena._resize_slabs, []

        def refused(blocks: Any, bring: Any = bring, sizes: Any = sizes, at_size: int = at_size) -> None:
            sizes.append(blocks)
            if len(sizes) == at_size + 1:
                raise RuntimeError(SAID)
            bring(blocks)

        monkeypatch.setattr(driver.core.runner.arena, "_resize_slabs", refused)
        assert driver.answers(PROMPTS, 12) == [tuple(theirs("llama", p, 12)) for p in PROMPTS]
        assert driver.core.cache.tables.capacity_tokens == 1024


@pytest.mark.parametrize("refusals", [1, 1_000])
def test_a_request_that_nothing_fits_for_is_tried_again_and_has_an_end(
    refusals: int, tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arena, which an app has given back, is refused in the step that would have begun with it."""
    driver, prompt = Driver(tiny("llama"), tokens=1024, prefill_budget=512), tokens_of(200)
    driver.core.relieve(True)
    with monkeypatch.context() as patch:
        left = iter(range(refusals))
        bring = driver.core.runner.arena._resize_slabs

        def refused(blocks: Any) -> None:
            if blocks != driver.core.runner.arena.blocks and next(left, None) is not None:
                raise RuntimeError(SAID)
            bring(blocks)

        patch.setattr(driver.core.runner.arena, "_resize_slabs", refused)
        handle = driver.add(prompt, 5)
        driver.finish()
    if refusals == 1:
        assert list(driver.result(handle).token_ids) == theirs("llama", prompt, 5)
    else:
        with pytest.raises(OutOfMemory, match="which has 200 tokens"):
            driver.result(handle)
    driver.core.check_invariants()
    assert driver.answers([prompt], 5) == [tuple(theirs("llama", prompt, 5))]


def test_what_a_processor_is_refused_is_no_fault_of_its(tiny: Any) -> None:
    def odd(tokens: Any, logits: Any) -> Any:
        asked.append(len(tokens))
        if len(asked) in (9, 21):
            raise RuntimeError(SAID)
        return logits * 1.5

    asked: list[int] = []
    driver = Driver(tiny("llama"), tokens=256, max_rows=3)
    wanted = run(driver, 12)
    assert run(driver, 12, logits_processors=(odd,)) == wanted and len(asked) > 21


def test_a_compaction_that_is_refused_leaves_nothing_that_cannot_be_trusted(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tiny("llama"), tokens=512)
    for prompt in (tokens_of(40, seed=1), PROMPTS[2]):
        driver.answers([prompt], 12)
    driver.core.cache.pools.drop_cached(4)
    with monkeypatch.context() as patch:

        def refused(*args: Any) -> None:
            raise RuntimeError(SAID)

        patch.setattr(driver.core.runner.arena, "copy_blocks", refused)
        driver.core.compact()
    driver.core.check_invariants()
    assert driver.answers([PROMPTS[2]], 12) == [tuple(theirs("llama", PROMPTS[2], 12))]


def test_whatever_fails_while_the_arena_shrinks_or_grows_or_blocks_move(tiny: Any, theirs: Any) -> None:
    """A refusal, also of the way back, and an exception."""
    kind = Kind(tiny("llama"), lambda prompt, _: theirs("llama", prompt, TEXT))
    Day(kind, counted := Plan()).run()
    first, *_, last = (at for at, site in enumerate(counted.sites) if site.startswith("arena._resize_array"))
    copy = next(at for at, site in enumerate(counted.sites) if site.startswith("arena.copy_blocks"))
    second_layer = first + 4
    for error, at, times in (
        ("refusal", second_layer, 1),
        ("refusal", second_layer, 4),
        ("exception", second_layer, 1),
        ("exception", last, 1),
        ("exception", copy, 1),
    ):
        assert Day(kind, Plan(error, at, times)).run()["right"] >= 3


@pytest.mark.slow
@pytest.mark.skipif("TRIALS" not in os.environ, reason="hours: TRIALS=1 does it at every allocation, TRIALS=6 of six")
@pytest.mark.parametrize("name", DAYS)
def test_a_failure_at_any_allocation(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A day of an engine is lived once to count its allocations, then once for each of them, each error, and once or
    four times in a row there: so a rollback fails, too.
    """
    kind, failed = kind_of(name, tmp_path), []

    def live(plan: Plan, number: int = -1) -> None:
        Day(kind, plan, tmp_path / f"store {number}" if kind.extra == "a store" else None).run()

    live(counted := Plan())
    every = int(os.environ["TRIALS"])
    plans = [(error, at, times) for at in range(0, len(counted.sites), every) for error in ERRORS for times in (1, 4)]
    for number, planned in enumerate(plans):
        try:
            live(Plan(*planned), number)
        except Exception as raised:
            failed.append((planned, counted.sites[planned[1]], repr(raised)))
        caplog.clear()  # else every traceback keeps its engine: 4 GB
    assert failed == []


def test_a_pinned_text_whose_state_had_to_go_is_kept_again_when_it_was_computed_again(tiny: Any) -> None:
    driver, text = Driver(tiny("lfm2"), tokens=2048, snapshots=4), tokens_of(64, seed=1)
    number, count = driver.core.pin(text, None)
    driver.answers([[*text, 1]], 1)
    driver.core.pins.pin_state(number)
    Refusals(driver.core, at({0: "under way"}))
    driver.answers([PROMPTS[1]], 4)
    driver.answers([[*text, 1]], 1)
    for seed in range(8):
        driver.answers([tokens_of(30, seed=seed)], 3)
    assert driver.result_of([*text, 1, 2], 2).usage.cached_tokens == count
