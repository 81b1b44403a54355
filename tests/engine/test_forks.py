"""Several answers to one prompt: one prefill, seeds of their own, the likeliest of many, events."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.types.request import FinishReason, TokenEvent
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of

PROMPT = tokens_of(45, seed=9)
HOT = {"temperature": 0.9, "seed": 5}


def test_the_prompt_is_computed_once(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=4, prefill_budget=512)
    computed: list[int] = []
    dispatch = driver.core.runner.dispatch

    def counting(plan: Any) -> Any:
        computed.append(sum(s.count for s in plan.segments if s.count > 1))
        return dispatch(plan)

    driver.core.runner.dispatch = counting  # type: ignore[method-assign]
    assert len(driver.result_of(PROMPT, 12, n=4, **HOT).others) == 3
    assert sum(computed) == len(PROMPT)
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize(("length", "prefix_cache"), [(1, True), (8, False), (9, True), (45, True)])
def test_each_answer_is_what_its_own_seed_gives_alone(tiny: Any, length: int, prefix_cache: bool) -> None:
    from cortexmlx.core.answers import answer_seed

    prompt = PROMPT[:length]
    driver = Driver(tiny("one layer"), max_rows=4, prefix_cache=prefix_cache)
    first = driver.result_of(prompt, 20, seed=5, n=4, temperature=0.9)
    answers = [first, *first.others]
    assert [a.index for a in answers] == [0, 1, 2, 3]
    alone = Driver(tiny("one layer"), max_rows=1, prefix_cache=False)
    for answer in answers:
        single = alone.result_of(prompt, 20, seed=answer_seed(5, answer.index), temperature=0.9)
        assert single.token_ids == answer.token_ids
    assert len({a.token_ids for a in answers}) == 4


def test_greedy_answers_are_all_the_same_and_end_together(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=3)
    first = driver.result_of(PROMPT, 30, n=5)
    assert {a.token_ids for a in (first, *first.others)} == {tuple(theirs("one layer", PROMPT, 30))}


def test_best_of_keeps_the_likeliest_of_all_answers(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=6)
    every = driver.result_of(PROMPT, 16, seed=3, n=6, temperature=1.2, logprobs=0)
    all_six = [every, *every.others]
    ranked = sorted(all_six, key=lambda c: -(c.cumulative_logprob or 0.0))
    best = driver.result_of(PROMPT, 16, seed=3, n=2, best_of=6, temperature=1.2)
    chosen = [best, *best.others]
    assert [c.token_ids for c in chosen] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in chosen] == [0, 1]
    for mine, wanted in zip(chosen, ranked, strict=False):
        assert mine.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-4)
        assert mine.logprobs is None, "nobody asked to see them"


def test_events_say_which_answer_they_belong_to(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=3)
    handle = driver.add(PROMPT, 14, n=3, **HOT)
    driver.finish()
    events: list[TokenEvent] = list(handle)
    first = driver.result(handle)
    for answer in (first, *first.others):
        own = [e for e in events if e.index == answer.index]
        assert tuple(e.token_id for e in own if e.token_id is not None) == answer.token_ids
        assert "".join(e.text for e in own) == answer.text
        assert [e.finish_reason for e in own if e.finish_reason] == [FinishReason.LENGTH]
    assert [e.completion is not None for e in events] == [False] * (len(events) - 1) + [True]


def test_best_of_streams_nothing_before_it_has_chosen(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=3)
    handle = driver.add(PROMPT, 14, n=1, best_of=3, **HOT)
    driver.finish()
    events = list(handle)
    assert len(events) == 1 and events[0].completion is not None


@pytest.mark.parametrize("steps", [0, 2, 9, 25])
def test_cancelling_ends_all_answers_within_a_step(tiny: Any, steps: int) -> None:
    driver = Driver(tiny("one layer"), max_rows=2, prefill_budget=16)
    handle = driver.add(PROMPT, 60, n=4, **HOT)
    driver.step(steps)
    handle.cancel()
    completion = driver.result(handle)
    assert completion.finish_reason is FinishReason.CANCELLED
    assert [c.finish_reason for c in completion.others] == [FinishReason.CANCELLED] * 3
    driver.finish()
    assert_nothing_lost(driver.core.stats())


def test_forked_prompts_do_not_count_as_found_in_the_prefix_cache(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=4)
    first = driver.result_of(PROMPT, 8, n=4, **HOT)
    assert [c.usage.cached_tokens for c in (first, *first.others)] == [0, 0, 0, 0]
    assert driver.core.stats().cached_tokens == 0
    second = driver.result_of(PROMPT, 8, n=4, **HOT)
    assert [c.usage.cached_tokens for c in (second, *second.others)] == [44] * 4
    assert driver.core.stats().cached_tokens == 44


def test_more_answers_than_fit_at_once_are_preempted_and_stay_the_same(tiny: Any) -> None:
    wide = Driver(tiny("one layer"), tokens=2048, max_rows=8)
    narrow = Driver(tiny("one layer"), tokens=104, max_rows=8)
    results = []
    for driver in (wide, narrow):
        first = driver.result_of(PROMPT[:20], 50, n=6, **HOT)
        results.append([c.token_ids for c in (first, *first.others)])
        assert_nothing_lost(driver.core.stats())
    assert results[0] == results[1]
    assert wide.core.stats().preemptions == 0 < narrow.core.stats().preemptions


def test_n_answers_through_the_engine_with_a_stop_string(tiny: Any) -> None:
    with Engine(tiny("one layer"), block_size=8, kv_memory="128KB") as engine:
        params = SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
        plain = engine.generate(PROMPT, params)
        stop = plain.text[5:7]
        cut = engine.generate(PROMPT, SamplingParams(**{**vars(params), "stop": [stop]}))
        for whole, part in zip((plain, *plain.others), (cut, *cut.others), strict=True):
            assert part.text == whole.text.partition(stop)[0]
        assert cut.finish_reason is FinishReason.STOP
