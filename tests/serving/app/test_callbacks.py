"""`on_event` is told of everything, in a thread of its own: of failures, of a close, and of the end of the program."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cortexmlx import Engine, TokenEvent
from support.asked import PROMPT, SHORT
from support.programs import outcome


def test_every_event_comes_in_its_order_on_one_other_thread(engine: Engine) -> None:
    events: list[TokenEvent] = []
    threads, done = set(), threading.Event()

    def listen(event: TokenEvent) -> None:
        events.append(event)
        threads.add(threading.current_thread())
        if event.completion is not None:
            done.set()

    answer = engine.submit(PROMPT, SHORT, on_event=listen).result(30)
    assert done.wait(30)
    assert "".join(event.text for event in events) == answer.text
    assert tuple(e.token_id for e in events if e.token_id is not None) == answer.token_ids
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_a_callback_may_ask_and_close_the_engine(engine: Engine) -> None:
    done = threading.Event()
    answers: list[Any] = []

    def listen(event: TokenEvent) -> None:
        if event.completion is not None:
            answers.append(engine.generate(PROMPT, SHORT).token_ids)
            engine.close()
            done.set()

    first = engine.submit(PROMPT, SHORT, on_event=listen).result(30)
    assert done.wait(30) and answers == [first.token_ids]


@pytest.mark.parametrize("how", ["e.close()", ""])
def test_a_program_that_ends_tells_of_it(tiny: Any, how: str) -> None:
    """Its engine closed, or left alone: whoever listens hears the end before the interpreter is gone."""
    program = f"""
def listen(event):
    if event.error or event.completion:
        print(type(event.error).__name__, event.finish_reason.value)
e = engine()
h = e.submit([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True), on_event=listen)
next(iter(e.stream([1, 2, 3])))
{how}
"""
    code, output, errors = outcome(program, tiny("llama"))
    assert (code, output, errors) == (0, "EngineClosed error\n", "")


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit", "GeneratorExit", "ValueError"])
def test_whatever_a_callback_raises_nothing_is_printed(tiny: Any, kind: str) -> None:
    program = f"""
import threading
begun = threading.Event()
def listen(event):
    begun.set()
    raise {kind}("mine")
with engine() as e:
    answer = e.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), on_event=listen).result()
    begun.wait(10)
print(len(answer.token_ids))
"""
    assert outcome(program, tiny("llama")) == (0, "4\n", "")
