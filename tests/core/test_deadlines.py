"""A request that has had its time ends with what it says, and takes nothing with it."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cortexmlx import CortexError, Engine, InvalidRequest, RequestTimeout, SamplingParams, TokenEvent
from cortexmlx.core.deadlines import Deadlines, checked_timeout
from cortexmlx.types.request import FinishReason, RequestId, RequestState
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import finally_nothing_lost
from support.engine.held import hold_long_answers
from support.patience import PATIENCE

A_STEP = PATIENCE
"""Seconds that each step takes on the engine's clock, which stands still otherwise."""

SOON = 30 * A_STEP
"""Time for 12 tokens, and not for 400."""


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose clock goes by its steps."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    for module in ("core.submitter", "core.core", "core.answers"):
        monkeypatch.setattr(f"cortexmlx.{module}.time", clock)

    def count(core: Any) -> None:
        step = core.step

        def counted() -> None:
            clock.now += A_STEP
            step()

        core.step = counted

    engine.inspect(count)
    return engine


def ways(engine: Engine) -> dict[str, Any]:
    async def stream() -> None:
        async for _ in engine.astream(PROMPT, LONG, timeout=SOON):
            pass

    return {
        "generate": lambda: engine.generate(PROMPT, LONG, timeout=SOON),
        "agenerate": lambda: asyncio.run(engine.agenerate(PROMPT, LONG, timeout=SOON)),
        "astream": lambda: asyncio.run(stream()),
        "aask": lambda: asyncio.run(engine.conversation().aask("hi", LONG, timeout=SOON)),
    }


def test_whoever_asks_with_a_timeout_is_told_that_it_is_over(slow: Engine) -> None:
    others = slow.submit(PROMPT, LONG)
    for ask in ways(slow).values():
        with pytest.raises(RequestTimeout, match=r"not finished after 18000 s: it was \w+, with \d+ tokens for a"):
            ask()
    assert len(others.result(PATIENCE).token_ids) == 400
    finally_nothing_lost(slow)


def test_it_is_a_timeout_and_one_of_ours(slow: Engine) -> None:
    events: list[TokenEvent] = []
    handle = slow.submit(PROMPT, LONG, timeout=SOON, listener=events.append)
    with pytest.raises(TimeoutError):
        handle.result(PATIENCE)
    assert handle.state is RequestState.FAILED and isinstance(handle._error, CortexError)
    assert events[-1].error is handle._error and events[-1].finish_reason is FinishReason.ERROR
    hold_long_answers(slow)
    with pytest.raises(TimeoutError):
        slow.submit(PROMPT, LONG).result(0.01)


def test_a_waiting_request_and_one_with_several_answers_have_their_time_too(slow: Engine) -> None:
    *running, waiting = slow.inspect(
        lambda core: [*(slow.submit(PROMPT, LONG) for _ in range(4)), slow.submit(PROMPT, SHORT, timeout=SOON)]
    )
    with pytest.raises(RequestTimeout, match="it was waiting, with 0 tokens"):
        waiting.result(PATIENCE)
    for handle in running:
        handle.cancel()
    with pytest.raises(RequestTimeout):
        slow.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True, n=3), timeout=SOON)
    finally_nothing_lost(slow)


def test_of_many_prompts_each_has_its_own_time(slow: Engine) -> None:
    params = [SHORT, LONG, SHORT]
    got = dict(slow.as_completed([PROMPT, PROMPT, PROMPT], params, timeout=SOON))
    assert isinstance(got[1], RequestTimeout)
    assert [len(got[i].token_ids) for i in (0, 2)] == [12, 12]  # type: ignore[union-attr]


def test_who_is_in_time_notices_nothing(engine: Engine) -> None:
    wanted = engine.generate(PROMPT, SHORT)
    assert engine.generate(PROMPT, SHORT, timeout=PATIENCE).token_ids == wanted.token_ids
    assert engine.generate(PROMPT, SHORT, timeout=None).token_ids == wanted.token_ids


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, 1e10, "5", True])
def test_what_is_no_time_is_refused(engine: Engine, timeout: Any) -> None:
    for ask in (engine.generate, engine.stream, engine.submit, engine.as_completed):
        with pytest.raises(InvalidRequest, match=r"timeout is .*, but must be a number of seconds in \(0, 1e9\] or No"):
            ask([PROMPT] if ask == engine.as_completed else PROMPT, SHORT, timeout=timeout)


def test_a_time_may_be_a_number_of_numpy(engine: Engine) -> None:
    for seconds in (np.int64(PATIENCE), np.float32(PATIENCE)):
        assert type(checked_timeout(seconds)) in (int, float)
        assert len(engine.generate(PROMPT, SHORT, timeout=seconds).token_ids) == 12


def test_each_is_late_once_and_who_has_ended_is_forgotten() -> None:
    """Beside a plain list of all that run."""
    dice, deadlines, running, late = random.Random(3), Deadlines(), {}, []
    for number in map(RequestId, range(500)):
        now = float(number)
        running[number] = now + dice.choice([1, 10, 10, 1000])
        deadlines.add(number, running[number])
        for gone in [n for n in running if dice.random() < 0.02]:
            del running[gone]
        due = sorted(n for n in running if running[n] <= now)
        passed = sorted(deadlines.pop_passed(now, running))
        assert passed == due
        late += passed
        for request in passed:
            del running[request]
    assert len(late) == len(set(late)) > 100
    assert list(deadlines.pop_passed(1e9, {})) == [] and len(deadlines.pending) == 0


def test_who_ended_behind_one_that_runs_for_long_is_forgotten_too() -> None:
    deadlines, running = Deadlines(), {RequestId(0)}
    deadlines.add(RequestId(0), 1e6)
    for number in map(RequestId, range(1, 5_000)):
        deadlines.add(number, 1e7)
        assert list(deadlines.pop_passed(1.0, running)) == []
    assert len(deadlines.pending) < 50
    assert list(deadlines.pop_passed(1e6, running)) == [RequestId(0)]
