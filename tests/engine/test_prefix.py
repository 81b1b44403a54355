"""The prefix cache through the engine's core: what is shared, what never is, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.types.request import RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.models.tiny import tokens_of

SYSTEM = tokens_of(70, seed=4)


# -- what is found again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 8, 17])
def test_the_same_prompt_again_computes_one_token(tiny: Any, theirs: Any, length: int) -> None:
    driver = Driver(tiny("llama"))
    prompt = SYSTEM[:length]
    assert driver.result_of(prompt, 10).usage.cached_tokens == 0
    again = driver.result_of(prompt, 10)
    assert again.usage.cached_tokens == length - 1
    assert list(again.token_ids) == theirs("llama", prompt, 10)


@pytest.mark.parametrize(("name", "answer"), [("llama", 1), ("windowed llama", 33), ("qwen3", 5), ("llama", 16)])
def test_a_chat_finds_its_own_answers_and_stays_in_one_run(tiny: Any, theirs: Any, name: str, answer: int) -> None:
    """All of the turn before is there, except its last token, which was never computed."""
    driver = Driver(tiny(name))
    text = SYSTEM[:21]
    before = 0
    for turn in range(4):
        handle = driver.add(text, answer)
        driver.step(2)
        job = next(iter(driver.core.scheduler.jobs), None)
        if job is not None:
            groups = range(len(driver.core.cache.groups))
            assert all(driver.core.cache.tables.find_run(job.id, g, len(text)) is not None for g in groups), "one run"
        driver.finish()
        done = driver.result(handle)
        assert done.usage.cached_tokens == before
        assert list(done.token_ids) == theirs(name, text, answer)
        before = len(text) + answer - 1
        text = [*text, *done.token_ids, *tokens_of(6, seed=turn)]


def test_a_token_that_ends_an_answer_early_is_there_for_the_next_turn(tiny: Any, theirs: Any) -> None:
    """The step after it was on its way, and has computed it."""
    text = SYSTEM[:21]
    greedy = theirs("llama", text, 12)
    end = next(i for i in range(4, 12) if greedy[i] not in greedy[:i])
    for pipeline, found in ((True, len(text) + end + 1), (False, len(text) + end)):
        driver = Driver(tiny("llama"), pipeline=pipeline)
        done = driver.result_of(text, 30, stop_token_ids=(greedy[end],))
        assert list(done.token_ids) == greedy[: end + 1]
        turn = [*text, *done.token_ids, *tokens_of(6, seed=3)]
        again = driver.result_of(turn, 10)
        assert again.usage.cached_tokens == found and list(again.token_ids) == theirs("llama", turn, 10)


def test_a_finished_rows_blocks_do_not_wait_for_the_others_windows(tiny: Any) -> None:
    driver = Driver(tiny("llama"))
    neighbour = driver.add(tokens_of(9, seed=8), 200)
    first = driver.add(SYSTEM[:20], 5)
    while first.state is not RequestState.FINISHED:
        driver.step()
    text = [*SYSTEM[:20], *driver.result(first).token_ids, 3, 1]
    second = driver.add(text, 4)
    while second.state is not RequestState.FINISHED:
        driver.step()
    assert driver.result(second).usage.cached_tokens == 24
    assert neighbour.state is RequestState.DECODING
    neighbour.cancel()


def test_part_of_a_block_is_copied_when_others_need_it_whole(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("llama"))
    driver.result_of(SYSTEM[:32], 1)
    prompt = [*SYSTEM[:29], 7, 7, 7, 9]
    branch = driver.result_of(prompt, 10)
    assert branch.usage.cached_tokens == 29
    assert list(branch.token_ids) == theirs("llama", prompt, 10)
    again = driver.result_of(SYSTEM[:40], 10)
    assert again.usage.cached_tokens == 32 and list(again.token_ids) == theirs("llama", SYSTEM[:40], 10)


def test_without_the_prefix_cache_nothing_is_found(tiny: Any) -> None:
    driver = Driver(tiny("llama"), prefix_cache=False)
    assert [driver.result_of(SYSTEM, 10).usage.cached_tokens for _ in range(2)] == [0, 0]
    stats = driver.core.stats()
    assert stats.cached_tokens == stats.cached_blocks == 0


# -- who waits for whom -----------------------------------------------------------------------------------------------


def computed_tokens(driver: Driver) -> list[int]:
    """A list to which every step adds the prompt tokens that it computes."""
    computed: list[int] = []
    dispatch = driver.core.runner.dispatch

    def counting(plan: Any) -> Any:
        computed.append(sum(s.count for s in plan.segments if s.count > 1 or not s.logits))
        return dispatch(plan)

    driver.core.runner.dispatch = counting  # type: ignore[method-assign]
    return computed


def test_requests_that_arrive_together_compute_a_shared_prefix_once(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("llama"), max_rows=8, prefill_budget=16)
    computed = computed_tokens(driver)
    prompts = [[*SYSTEM[:64], *tokens_of(6, seed=20 + i)] for i in range(5)]
    assert driver.answers(prompts, 8) == [tuple(theirs("llama", p, 8)) for p in prompts]
    assert sum(computed) == 64 + 5 * 6
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("steps", [1, 3])
def test_who_waits_for_a_prefix_goes_on_when_its_computer_is_cancelled(tiny: Any, theirs: Any, steps: int) -> None:
    driver = Driver(tiny("llama"), prefill_budget=16)
    prompts = [[*SYSTEM[:64], 1, 2], [*SYSTEM[:64], 3], [*SYSTEM[:64], 4, 4, 4]]
    handles = [driver.add(p, 8) for p in prompts]
    driver.step(steps)
    handles[0].cancel()
    driver.finish()
    for prompt, handle in list(zip(prompts, handles, strict=True))[1:]:
        assert list(driver.result(handle).token_ids) == theirs("llama", prompt, 8)
    assert_nothing_lost(driver.core.stats())


# -- what is never shared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 7, 8])
def test_prompts_that_differ_in_one_early_token_share_nothing_after_it(tiny: Any, theirs: Any, place: int) -> None:
    driver = Driver(tiny("llama"), prefill_budget=512)
    other = [*SYSTEM[:place], (SYSTEM[place] + 1) % 256, *SYSTEM[place + 1 :]]
    first, second = driver.add(SYSTEM, 30), driver.add(other, 30)
    driver.step(4)
    jobs = driver.core.scheduler.jobs
    tables = [set(driver.core.cache.tables.block_table(j.id, 0).tolist()[place // 8 :]) for j in jobs]
    assert len(jobs) == 2 and not tables[0] & tables[1]
    driver.finish()
    assert driver.result(second).usage.cached_tokens <= place
    assert list(driver.result(first).token_ids) == theirs("llama", SYSTEM, 30)
    assert list(driver.result(second).token_ids) == theirs("llama", other, 30)


def test_colliding_hashes_are_refused_and_the_tokens_stay_right(tiny: Any, theirs: Any) -> None:
    """Every block of every text has the same key."""
    driver = Driver(tiny("llama"), tokens=1024)
    driver.core.cache.prefix = driver.core.cache.pools.prefix = PrefixCache(
        8, hash_function=lambda parent, tokens: b"same"
    )
    prompts = [tokens_of(n, seed=n) for n in (30, 31, 40, 30)] + [SYSTEM, SYSTEM[:33]]
    for _ in range(2):
        assert driver.answers(prompts, 20) == [tuple(theirs("llama", p, 20)) for p in prompts]
        driver.core.cache.check_invariants()
    assert_nothing_lost(driver.core.stats())
