"""`engine.as_completed`: answers as they finish, a bounded number of prompts read ahead, and every way of ending."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cortexmlx import ChatPrompt, Engine
from cortexmlx.errors import EngineClosed, InvalidRequest, PromptTooLong
from cortexmlx.types.request import Completion
from cortexmlx.types.sampling_params import SamplingParams
from support.engine.core_driver import finally_nothing_lost
from support.engine.held import hold_long_answers
from support.models.tiny import tokens_of

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture
def engine(tiny: Any) -> Iterator[Engine]:
    with Engine(tiny("one layer"), kv_memory="512KB", max_rows=2) as opened:
        yield opened


def endless(read: list[int]) -> Iterator[list[int]]:
    for number in itertools.count():
        read.append(number)
        yield tokens_of(4, seed=number)


def test_answers_come_in_the_order_of_finishing_and_are_the_right_ones(tiny: Any, theirs: Any) -> None:
    prompts, limits = [tokens_of(5, seed=i) for i in range(4)], [60, 4, 90, 25]
    with Engine(tiny("one layer"), kv_memory="512KB", max_rows=4) as engine:
        results = list(engine.as_completed(prompts, (SamplingParams(max_tokens=n) for n in limits)))
    expected = {i: theirs("one layer", p, n) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))}
    assert [index for index, _ in results] == sorted(expected, key=lambda i: len(expected[i]))
    answers = dict(results)
    assert all(isinstance(a, Completion) and list(a.token_ids) == expected[i] for i, a in answers.items())


@pytest.mark.parametrize(("window", "most"), [(None, 8), (5, 5)])
def test_at_most_four_prompts_per_row_are_read_ahead_and_none_behind_the_window(
    engine: Engine, window: int | None, most: int
) -> None:
    """`tests/core/test_as_completed.py` has every order: here is how far an engine reads."""
    read: list[int] = []
    completed = engine.as_completed(endless(read), SHORT, window=window)
    assert read == []
    next(completed)
    assert len(read) == most
    completed.close()
    assert list(completed) == []
    finally_nothing_lost(engine)


def test_a_prompt_that_is_refused_or_fails_while_it_runs_is_an_error_of_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine._worker.core.add

    def broken(request: Any, handle: Any, stops: Any, *grammar: Any) -> None:
        if len(request.prompt) == 7:
            raise RuntimeError("a bug")
        add(request, handle, stops)

    monkeypatch.setattr(engine._worker.core, "add", broken)
    room = engine.stats().total_blocks * engine.stats().block_size
    prompts: list[Any] = [tokens_of(6), tokens_of(7), [], [10**6], tokens_of(room + 1), tokens_of(8)]
    results = dict(engine.as_completed(prompts, SHORT))
    assert "a bug" in str(results.pop(1))
    kinds = {0: Completion, 2: InvalidRequest, 3: InvalidRequest, 4: PromptTooLong, 5: Completion}
    assert {index: type(result) for index, result in results.items()} == kinds
    finally_nothing_lost(engine)


def test_dropping_the_iterator_cancels_the_rest(engine: Engine) -> None:
    hold_long_answers(engine)
    completed = engine.as_completed([tokens_of(4, seed=i) for i in range(20)], [LONG, *[SHORT] * 19])
    next(completed)
    assert engine.stats().rows_running >= 1
    del completed
    finally_nothing_lost(engine)


def test_an_interrupt_while_waiting_cancels_the_rest(engine: Engine) -> None:
    hold_long_answers(engine)
    completed = engine.as_completed([tokens_of(4, seed=i) for i in range(20)], LONG)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        for _ in completed:
            pass
    assert list(completed) == []
    finally_nothing_lost(engine)


def test_an_error_of_the_prompts_iterator_comes_out_and_cancels_the_rest(engine: Engine) -> None:
    def broken() -> Iterator[list[int]]:
        yield tokens_of(4)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.as_completed(broken(), LONG))
    finally_nothing_lost(engine)


def test_a_closed_engine_ends_the_iteration(tiny: Any) -> None:
    with Engine(tiny("one layer"), kv_memory="512KB", max_rows=2) as engine:
        hold_long_answers(engine)
        completed = engine.as_completed([tokens_of(4, seed=i) for i in range(20)], [LONG, *[SHORT] * 19])
        next(completed)
    with pytest.raises(EngineClosed):
        list(completed)


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        (iter([[1], [2]]), [SHORT], "params for 1 prompts only"),
        (iter([[1]]), iter([SHORT, SHORT]), "1 prompts need 1 params, not more"),
        ([[1], [2]], [SHORT], "2 prompts need 2 params, not 1"),
        ("hello", SHORT, "put a single one into a list"),
        (ChatPrompt([{"role": "user", "content": "hello"}]), SHORT, "put a single one into a list"),
    ],
)
def test_there_are_as_many_params_as_prompts(engine: Engine, prompts: Any, params: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        list(engine.as_completed(prompts, params))
    finally_nothing_lost(engine)


def test_a_window_holds_at_least_one(engine: Engine) -> None:
    for wrong in (0, 1.5, True):
        with pytest.raises(InvalidRequest, match=f"window is {wrong}"):
            engine.as_completed([[1]], window=wrong)  # type: ignore[arg-type]
    assert len(list(engine.as_completed([[1], [2]], SHORT, window=np.int64(1)))) == 2  # type: ignore[arg-type]
