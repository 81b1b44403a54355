"""`on_event` of very many requests of an engine, and of a program that forks in it."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from contextlib import suppress
from typing import Any

import pytest

from cortexmlx import Engine, EngineClosed, SamplingParams, TokenEvent
from cortexmlx.core.callbacks import CallbackThreads
from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import CortexError
from support.patience import PATIENCE, soon


def test_a_child_that_is_forked_by_a_function_ends() -> None:
    """Its only thread is the one that told the event, and another request is never told there."""
    children: list[int] = []

    def fork(event: TokenEvent) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            children.append(os.fork())

    callers = CallbackThreads()
    handles = [RequestHandle(number, lambda request: None) for number in range(2)]
    for handle in handles:
        callers.subscribe(handle, fork)
    handles[0].fail(CortexError("it broke"))
    assert soon(lambda: children)
    try:
        assert soon(lambda: os.waitpid(children[0], os.WNOHANG)[0]), "the child never ends"
    except AssertionError:
        os.kill(children[0], signal.SIGKILL)
        raise
    finally:
        callers.abandon()


@pytest.mark.slow
def test_each_of_very_many_hears_its_answer_byte_for_byte(engine: Engine) -> None:
    """Some are slow, ask others, cancel, or raise; at last the engine is closed under them."""
    dice = random.Random(5)
    heard: list[tuple[Any, list[TokenEvent], int | None]] = []

    def ask(again: bool) -> None:
        own: list[RequestHandle] = []
        events: list[TokenEvent] = []
        nap, raises = dice.choice([0, 0, 0, 0.001, 0.05]), dice.choice([None] * 9 + [3])
        cancels, asks = dice.random() < 0.1, again and dice.random() < 0.2

        def listen(event: TokenEvent) -> None:
            events.append(event)
            time.sleep(nap)
            if len(events) == 2 and asks:
                with suppress(EngineClosed):
                    ask(again=False)
            if len(events) == 2 and cancels:
                for handle in own:
                    handle.cancel()
            if len(events) == raises:
                raise ValueError

        params = SamplingParams(max_tokens=dice.randrange(1, 12), ignore_eos=True, temperature=1, seed=len(heard))
        prompt = [dice.randrange(1, 9) for _ in range(dice.choice([1, 5, 40]))]
        own.append(engine.submit(prompt, params, on_event=listen))
        heard.append((own[0], events, raises))

    for number in range(1500):
        ask(again=True)
        if number == 1300:
            assert soon(lambda: sum(handle.ended for handle, _, _ in list(heard)) > 1200)
    engine.close()
    engine._callbacks.join(PATIENCE)
    assert not engine._callbacks._open
    for handle, events, raises in heard:
        if raises is not None and len(events) == raises:
            continue
        last = events[-1]
        assert all(event.completion is None and event.error is None for event in events[:-1])
        if last.completion is None:
            assert isinstance(last.error, EngineClosed)
        else:
            answer = handle.result()
            assert last.completion is answer and "".join(event.text for event in events) == answer.text
            assert tuple(e.token_id for e in events if e.token_id is not None) == answer.token_ids
