"""Memory that is given back: pressure, cancellation, closing; and what one request or one client may have."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.errors import CortexError, EngineClosed, InvalidRequest, KVCacheFull, MemoryRefused, PromptTooLong
from cortexmlx.kv.arena import KVArena
from cortexmlx.types.request import RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.held import hold_long_answers
from support.models.tiny import tokens_of
from support.patience import soon

PROMPT = tokens_of(30, seed=1)


def client_of(driver: Driver, prompt: list[int], client: str, max_tokens: int = 8) -> Any:
    """A request of a client, straight into the scheduler's queue."""
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.core.text import StopConditions
    from cortexmlx.types.request import QueuedRequest

    handle = RequestHandle(1000 + len(driver.core.requests.by_id), driver.core.cancel)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    driver.core.add(QueuedRequest(tuple(prompt), params, 0, time.perf_counter(), client), handle, StopConditions())
    return handle


# -- on_memory_pressure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "level"), [(0, "critical"), (4, "warning"), (9, "critical"), (17, "critical"), (30, "warning")]
)
def test_pressure_at_any_step_changes_no_token(tiny: Any, theirs: Any, level: str, steps: int) -> None:
    driver = Driver(tiny("one layer"), tokens=1024, max_rows=3, prefill_budget=16)
    prompts = [tokens_of(n, seed=50 + n) for n in (30, 9, 50)]
    handles = [driver.add(p, 40) for p in prompts]
    driver.step(steps)
    handles[0].cancel() if steps == 17 else None
    driver.core.relieve(level == "critical")
    driver.core.cache.check_invariants()
    driver.finish()
    for prompt, handle in zip(prompts, handles, strict=True):
        answer = list(driver.result(handle).token_ids)
        assert answer == theirs("one layer", prompt, 40)[: len(answer)]
        assert len(answer) == 40 or handle.state is RequestState.CANCELLED
    assert_nothing_lost(driver.core.stats())


def test_pressure_after_the_last_request_was_cancelled_with_a_step_in_flight(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=8192)
    handle = driver.add(tokens_of(20, seed=1), 40)
    driver.step(5)
    assert handle.state is RequestState.DECODING
    handle.cancel()
    assert driver.core.scheduler.is_idle and not driver.core.idle
    driver.core.relieve(True)
    assert driver.core.runner.arena.blocks == driver.core.cache.pools.blocks == (1,)
    driver.core.check_invariants()


@pytest.mark.parametrize("steps", [2, 20])
def test_pressure_while_requests_run_that_are_cancelled_then(tiny: Any, theirs: Any, steps: int) -> None:
    """The arena's end cannot be given back while they run, and nobody plans a step once they are gone."""
    driver = Driver(tiny("one layer"), tokens=8192)
    driver.add(PROMPT, 60)
    long = driver.add(tokens_of(300, seed=2), 60)
    driver.step(steps)
    before = driver.core.runner.arena.blocks
    driver.core.relieve(True)
    for request in (1, long.id):
        driver.core.cancel(request)
    driver.finish()
    driver.core.tidy()
    assert driver.core.runner.arena.blocks == driver.core.cache.pools.blocks < before
    driver.core.check_invariants()
    assert driver.answers([PROMPT], 20) == [tuple(theirs("one layer", PROMPT, 20))]
    driver.core.tidy()
    assert driver.core.runner.arena.blocks > (1,), "what was asked once is done once"


@pytest.mark.parametrize("idle", [True, False])
def test_pressure_where_the_system_refuses_even_the_smaller_arena_keeps_the_arena(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    driver = Driver(tiny("one layer"), tokens=8192)
    wanted = tuple(theirs("one layer", PROMPT, 20))
    assert driver.answers([PROMPT], 20) == [wanted]
    before = driver.core.runner.arena.blocks
    if not idle:
        driver.add(PROMPT, 60)
        driver.step(3)

    def refused(arena: Any, blocks: int) -> None:
        raise MemoryRefused("the allocation failed after it was promised")

    with monkeypatch.context() as patch:
        patch.setattr(KVArena, "resize", refused)
        driver.core.relieve(True)
        if not idle:
            driver.core.cancel(2)
            driver.finish()
            driver.core.tidy()
    assert driver.core.runner.arena.blocks == driver.core.cache.pools.blocks == before
    driver.core.check_invariants()
    assert driver.answers([PROMPT], 20) == [wanted]


def test_a_warning_halves_the_unused_cache_and_a_critical_one_gives_the_arena_back(tiny: Any, theirs: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=8192)
    driver.answers([tokens_of(400, seed=i) for i in range(8)], 4)
    before = driver.core.stats()
    assert before.cached_blocks > 300 and before.total_blocks > 256, "the arena must have grown"
    driver.core.relieve(False)
    assert driver.core.stats().cached_blocks == before.cached_blocks // 2
    driver.core.relieve(True)
    after = driver.core.stats()
    assert after.cached_blocks == 0 and after.total_blocks == 1
    assert after.kv_bytes < before.kv_bytes / 100
    assert after.kv_bytes_limit == before.kv_bytes_limit
    assert driver.answers([PROMPT], 20) == [tuple(theirs("one layer", PROMPT, 20))], "it grows again"


def test_pressure_through_the_engine_and_a_level_that_does_not_exist(tiny: Any) -> None:
    with Engine(tiny("one layer"), block_size=8) as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
        engine.on_memory_pressure("warning")
        engine.on_memory_pressure("critical")
        assert engine.stats().cached_blocks == 0
        with pytest.raises(InvalidRequest, match="level is 'panic'"):
            engine.on_memory_pressure("panic")


@pytest.mark.parametrize("others", [0, 1])
def test_one_refused_look_after_pressure_costs_one_request_at_most(
    others: int, tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given back is asked for again: at once by the next request of an idle engine, and beside others."""
    driver, prompt, short = Driver(tiny("one layer"), tokens=1024), tokens_of(100, seed=3), [False]
    monkeypatch.setattr("cortexmlx.kv.arena.can_allocate", lambda size: not short[0])
    driver.core.relieve(True)
    for _ in range(others):
        driver.add(PROMPT, 90)
    driver.step(8)
    driver.core.relieve(True)
    driver.step(2)
    short[0] = True
    refused = driver.add(prompt, 20)
    if not others:
        driver.finish()
        with pytest.raises(KVCacheFull, match="100 tokens and the KV cache holds 8, for the system refuses it more"):
            driver.result(refused)
    driver.step(3)
    short[0] = False
    assert list(driver.result_of(prompt, 20).token_ids) == theirs("one layer", prompt, 20)
    assert driver.core.scheduler.limits.max_answer_tokens(0, driver.core.cache.tables.configured_tokens) == 512


def test_an_answer_that_memory_bounded_may_be_long_again_when_there_is_more(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows are refused more when one needs it, and the other goes on: it is bounded only while that lasts."""
    driver, short = Driver(tiny("one layer"), tokens=4096, max_rows=2), [False]
    monkeypatch.setattr("cortexmlx.kv.arena.can_allocate", lambda size: not short[0])
    driver.core.relieve(True)
    long = driver.add(PROMPT, 250)
    driver.step(10)
    driver.core.relieve(True)
    driver.step(2)
    short[0] = True
    refused = driver.add(tokens_of(300, seed=4), 5)
    driver.step(2)
    short[0] = False
    driver.finish()
    answers = [driver.result(handle).token_ids for handle in (long, refused)]
    assert [list(answer) for answer in answers] == [
        theirs("one layer", PROMPT, 250),
        theirs("one layer", tokens_of(300, seed=4), 5),
    ]


# -- cancelling and closing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 6, 20])
def test_cancelling_frees_the_blocks_within_one_step(tiny: Any, steps: int) -> None:
    driver = Driver(tiny("one layer"), prefill_budget=16)
    other, handle = driver.add(tokens_of(9), 60), driver.add(PROMPT, 60)
    driver.step(steps)
    driver.core.drain()
    handle.cancel()
    driver.step(1)
    stats = driver.core.stats()
    assert handle.state is RequestState.CANCELLED and len(stats.sequences) == 1
    driver.core.cancel(other.id)
    driver.step(1)
    assert driver.core.stats().used_blocks == 0


def test_closing_with_a_hundred_requests_in_flight_resolves_every_handle(tiny: Any) -> None:
    Engine(tiny("one layer")).close()  # mlx needs the threads that it has seen: they wait for the next engine
    threads = threading.active_count()
    engine = Engine(tiny("one layer"), block_size=8, kv_memory="128KB", max_rows=16)
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    hold_long_answers(engine, tokens=1)
    handles = [engine.submit(tokens_of(20 + i % 30, seed=i), long) for i in range(100)]
    assert soon(lambda: engine.stats().generated_tokens)
    engine.close()
    for handle in handles:
        with pytest.raises(EngineClosed):
            handle.result(0)
    assert soon(lambda: threading.active_count() <= threads)


# -- caps -------------------------------------------------------------------------------------------------------------


def test_a_request_may_not_be_longer_than_its_cap(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_request_tokens=40)
    assert len(driver.answers([PROMPT], 32)[0]) == 10
    handle = driver.add(tokens_of(40), 4)
    with pytest.raises(PromptTooLong, match="40 tokens and a request may have 40"):
        handle.result(0)


def test_a_clients_requests_run_within_its_share_and_leave_room_for_others(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=2, client_tokens=60)
    greedy = [client_of(driver, tokens_of(30, seed=i), "greedy", 20) for i in range(6)]
    modest = client_of(driver, tokens_of(30, seed=9), "modest", 20)
    most = 0
    while modest.state is not RequestState.FINISHED:
        driver.step()
        running = [j for j in driver.core.scheduler.jobs if j.is_running and j.client == "greedy"]
        most = max(most, sum(j.is_running for j in running))
    assert most == 1, "two of its requests are more than its share"
    assert sum(h.state is RequestState.FINISHED for h in greedy) <= 1, "the other client must not wait for all six"
    driver.finish()
    assert all(len(h.result(0).token_ids) == 20 for h in greedy)


def test_a_request_over_its_clients_share_runs_alone(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), max_rows=4, client_tokens=10)
    handles = [client_of(driver, PROMPT, "one") for _ in range(3)]
    driver.finish()
    assert all(len(h.result(0).token_ids) == 8 for h in handles)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tiny: Any) -> None:
    driver = Driver(tiny("one layer"), tokens=64)
    with pytest.raises(CortexError, match="65 tokens and the KV cache holds 64"):
        driver.add(tokens_of(65), 4).result(0)
