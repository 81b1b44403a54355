"""What recurrent models compute again, and what not: a text begins at the latest snapshot of its state, and the tokens
are those of a text that is computed from its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cortexmlx.types.request import Completion, RequestState
from support.engine.core_driver import Driver, assert_nothing_lost
from support.engine.judge import assert_same
from support.models.recurrent import RECURRENT
from support.models.tiny import tokens_of

EVERY = [name if name == "lfm2" else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]
FEW = ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "rwkv7"))]
"""Convolutions beside attention; a delta rule beside attention; no attention."""
SYSTEM = tokens_of(45, seed=9)


def driver_of(model: Any, snapshots: int = 16, **config: Any) -> Driver:
    driver = Driver(model, **({"tokens": 2048, "prefill_budget": 24} | config))
    assert driver.core.cache.states.snapshots is not None
    driver.core.cache.states.snapshots.max_snapshots = snapshots
    return driver


def ask(driver: Driver, prompt: Sequence[int], tokens: int = 10, **params: Any) -> Completion:
    done = driver.result_of(prompt, tokens, **params)
    driver.core.check_invariants()
    return done


def same(judged: Any, theirs: Any, name: str, prompt: Sequence[int], mine: Sequence[int]) -> None:
    """mlx-lm's own tokens, up to proven ties."""
    assert_same(judged(name)[0], prompt, mine, theirs(name, list(prompt), len(mine)))


@pytest.mark.parametrize("name", EVERY)
def test_turns_repeats_and_shared_beginnings_compute_what_is_new(
    name: str, tiny: Any, judged: Any, theirs: Any
) -> None:
    driver = driver_of(tiny(name))

    def asked(prompt: Sequence[int], cached: int) -> list[int]:
        done = ask(driver, prompt, ignore_eos=False)
        same(judged, theirs, name, prompt, done.token_ids)
        assert done.usage.cached_tokens == cached
        return list(done.token_ids)

    first = [*SYSTEM, *tokens_of(5, seed=1)]
    answer = asked(first, 0)
    assert asked(first, len(first) - 1) == answer
    turn = [*first, *answer, *tokens_of(9, seed=2)]
    asked(turn, len(first) + len(answer) - 1)
    asked([*SYSTEM, *tokens_of(7, seed=3)], 0)
    asked([*SYSTEM, *tokens_of(8, seed=4)], 40)  # the one before has left a state where the two parted
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("steps", [2, 3, 4, 9, 25])
def test_a_turn_that_was_cancelled_is_not_lost(name: str, steps: int, tiny: Any, judged: Any, theirs: Any) -> None:
    """Whether while the prompt was computed or the answer, or with a step in flight."""
    driver = driver_of(tiny(name), prefill_budget=16)
    prompt = tokens_of(34, seed=21)
    handle = driver.add(prompt, 64)
    driver.step(steps)
    driver.core.cancel(handle.id)
    driver.finish()
    driver.core.check_invariants()
    got = driver.result(handle).token_ids
    turn = [*prompt, *got, *tokens_of(5, seed=4)]
    done = ask(driver, turn)
    same(judged, theirs, name, turn, done.token_ids)
    whole = len(prompt) + len(got) - 1
    assert done.usage.cached_tokens in (whole, whole + 1) if got else done.usage.cached_tokens >= 16
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("name", FEW)
def test_who_waits_for_a_shared_beginning_begins_behind_it(name: str, tiny: Any, judged: Any, theirs: Any) -> None:
    driver = driver_of(tiny(name))
    prompts = [[*tokens_of(64, seed=77), *tokens_of(7, seed=i)] for i in range(3)]
    answers = driver.answers(prompts, 12)
    for prompt, answer in zip(prompts, answers, strict=True):
        same(judged, theirs, name, prompt, answer)
    assert driver.core.scheduler.cached_tokens == 2 * 64


@pytest.mark.parametrize("snapshots", [0, 1])
def test_nobody_waits_twice_for_a_state_that_is_not_kept(snapshots: int, tiny: Any) -> None:
    """With room for one, the end of the first prompt drives out what the others wait for."""
    driver = driver_of(tiny("lfm2"), snapshots=snapshots, max_rows=8, prefill_budget=1024)
    for seed in range(8):
        driver.add([*tokens_of(64, seed=77), *tokens_of(7, seed=seed)], 32)
    driver.step(4)
    assert [job.state for job in driver.core.scheduler.jobs] == [RequestState.DECODING] * 8
    driver.finish()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answers_to_one_prompt_begin_before_its_last_token(name: str, prefix_cache: bool, tiny: Any) -> None:
    params = {"n": 3, "temperature": 0.8}
    driver = driver_of(tiny(name), prefix_cache=prefix_cache)
    plain = driver_of(tiny(name), snapshots=0, max_rows=1, pipeline=False)
    for length in (1, 16, 17, 29):
        mine, wanted = (ask(d, tokens_of(length, seed=5), 14, seed=3, **params) for d in (driver, plain))
        assert [c.token_ids for c in (mine, *mine.others)] == [c.token_ids for c in (wanted, *wanted.others)]
    assert_nothing_lost(driver.core.stats())


@pytest.mark.parametrize("name", FEW)
def test_a_preempted_row_goes_on_where_it_was(name: str, tiny: Any, judged: Any, theirs: Any) -> None:
    driver = driver_of(tiny(name), prefill_budget=32)
    prompt = tokens_of(30, seed=6)
    handle = driver.add(prompt, 30)
    driver.step(9)
    (job,) = driver.core.scheduler.jobs
    driver.core.drain()
    flushed = driver.core.scheduler._window.close()
    assert flushed is not None
    driver.core.scheduler._preempt(job)
    plan = driver.core.scheduler._builder.build_flush(flushed)
    assert driver.core.runner.dispatch(plan) is None
    driver.core.runner.collect()
    length = len(job.tokens)
    driver.step()
    assert job.state is not RequestState.PREEMPTED and job.state_at >= length
    driver.finish()
    same(judged, theirs, name, prompt, driver.result(handle).token_ids)


def test_snapshots_are_as_many_as_may_be(tiny: Any, judged: Any, theirs: Any) -> None:
    """And with few of them the tokens are the same."""
    driver = driver_of(tiny("lfm2"), snapshots=2)
    first = [*SYSTEM, *tokens_of(5, seed=1)]
    for prompt in ([*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5], first, first, [*SYSTEM, 4, 5]):
        same(judged, theirs, "lfm2", prompt, ask(driver, prompt).token_ids)
        store = driver.core.runner.states
        driver.core.tidy()
        assert len(store._snapshots) == len(driver.core.cache.states.snapshots) <= 2


@pytest.mark.parametrize("snapshots", [1, 2])
def test_the_next_turn_may_come_at_once(snapshots: int, tiny: Any, judged: Any, theirs: Any) -> None:
    """It begins in the step that keeps the state of the turn before, and wants to keep its own."""
    driver = driver_of(tiny("lfm2"), snapshots=snapshots)
    turn, handle = SYSTEM, driver.add(SYSTEM, 10)
    while not handle.ended:
        driver.step()
    turn = [*turn, *driver.result(handle).token_ids, 1, 2, 3]
    same(judged, theirs, "lfm2", turn, ask(driver, turn).token_ids)


def test_under_memory_pressure_snapshots_go_with_their_blocks(tiny: Any) -> None:
    driver = driver_of(tiny("lfm2"))
    ask(driver, SYSTEM)
    assert driver.core.stats().state_bytes > 0
    driver.core.relieve(True)
    assert driver.core.stats().state_bytes == 0
    assert ask(driver, SYSTEM).usage.cached_tokens == 0


def test_a_step_that_fails_leaves_no_state_behind(tiny: Any, judged: Any, theirs: Any) -> None:
    driver = driver_of(tiny("lfm2"))
    ask(driver, SYSTEM)
    driver.add(SYSTEM, 5)
    driver.step()
    from cortexmlx.errors import CortexError

    driver.core.fail_all(CortexError("as a test wants it"))
    driver.core.check_invariants()
    assert driver.core.runner.states.nbytes == 0
    done = ask(driver, SYSTEM)
    assert done.usage.cached_tokens == 0
    same(judged, theirs, "lfm2", SYSTEM, done.token_ids)
    driver.core.reset()
    assert ask(driver, SYSTEM).token_ids == done.token_ids


def test_clients_do_not_find_each_others_states(tiny: Any) -> None:
    driver = driver_of(tiny("lfm2"))
    handles = [driver.add(SYSTEM, 5, client=client) for client in ("one", "other")]
    driver.finish()
    assert [driver.result(h).usage.cached_tokens for h in handles] == [0, 0]
    assert driver.result_of(SYSTEM, 5, client="one").usage.cached_tokens == len(SYSTEM) - 1
