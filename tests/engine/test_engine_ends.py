"""Requests that end before their time: failed, closed. The others go on, and nothing is lost."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cortexmlx import CortexError, Engine
from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import EngineClosed
from cortexmlx.types.request import FinishReason, RequestState, TokenEvent
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import assert_nothing_lost, finally_nothing_lost
from support.engine.held import hold_long_answers
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon
from support.programs import outcome

# -- failed -----------------------------------------------------------------------------------------------------------


def test_a_listener_that_raises_is_logged_and_harms_nobody(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def listen(_: Any) -> None:
        raise ZeroDivisionError("the listener's own mistake")

    with caplog.at_level(logging.ERROR, "cortexmlx"):
        handle = engine.submit(PROMPT, SHORT, on_event=listen)
        assert len(handle.result(PATIENCE).token_ids) == 12
        assert soon(lambda: "ZeroDivisionError" in caplog.text)
    assert engine.generate(PROMPT, SHORT).token_ids == handle.result().token_ids
    finally_nothing_lost(engine)


def fail_once(owner: Any, name: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call number `after` of a method raises; all others work."""
    original, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == after:
            raise RuntimeError("it broke")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


PARTS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "plan": lambda core: (core.scheduler, "plan"),
    "dispatch": lambda core: (core.runner, "dispatch"),
    "writing": lambda core: (core.runner.arena, "write"),
    "collect": lambda core: (core.runner, "collect"),
    "commit": lambda core: (core.scheduler, "commit"),
}


@pytest.mark.parametrize(
    ("part", "after"), [*((part, 2 + number) for number, part in enumerate(PARTS)), ("writing", 1), ("collect", 19)]
)
def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    tiny: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, part: str, after: int
) -> None:
    with Engine(tiny("one layer"), kv_memory="32KB", block_size=8, max_rows=3, prefill_budget=32) as engine:
        core = engine._worker.core
        fail_once(*PARTS[part](core), after, monkeypatch)
        prompts = [tokens_of(n, seed=n) for n in (30, 9, 40, 5)]
        handles: list[RequestHandle] = []
        engine._worker.submit([engine._submitter.prepare(engine, p, LONG) for p in prompts], handles)  # all in one step
        for handle in handles:
            with pytest.raises(CortexError, match="it broke"):
                handle.result(PATIENCE)
            assert handle.state is RequestState.FAILED
        monkeypatch.undo()
        assert_nothing_lost(engine.stats())
        for n in (33, 8):
            prompt = tokens_of(n, seed=50 + n)
            assert list(engine.generate(prompt, SHORT).token_ids) == theirs("one layer", prompt, 12)
        assert_nothing_lost(engine.stats())


def test_a_listener_on_the_engines_thread_that_raises_ends_no_request(engine: Engine) -> None:
    heard: list[TokenEvent] = []

    def listen(event: TokenEvent) -> None:
        if event.progress is not None:
            return
        heard.append(event)
        raise ZeroDivisionError("the listener's own mistake")

    other = engine.submit(PROMPT, LONG)
    handle = engine.submit(PROMPT, SHORT, listener=listen)
    assert len(handle.result(PATIENCE).token_ids) == 12
    assert len(other.result(PATIENCE).token_ids) == 400
    assert heard[0].completion is None and {event.completion for event in heard[1:]} == {handle.result()}


def told(seen: list[TokenEvent]) -> TokenEvent:
    """The event that ends what a callback is told."""
    assert soon(lambda: seen and (seen[-1].error or seen[-1].completion)), f"no end among {len(seen)} events"
    return seen[-1]


def test_a_callback_is_told_of_a_failure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TokenEvent] = []
    fail_once(engine._worker.core.runner, "collect", 5, monkeypatch)
    handle = engine.submit(PROMPT, LONG, on_event=seen.append)
    with pytest.raises(CortexError, match="it broke"):
        handle.result(PATIENCE)
    last = told(seen)
    assert (last.finish_reason, last.error, last.completion) == (FinishReason.ERROR, handle._error, None)
    assert all(event.error is None for event in seen[:-1])


def test_a_callback_is_told_that_the_engine_was_closed(tiny: Any) -> None:
    seen: list[TokenEvent] = []
    with Engine(tiny("one layer"), kv_memory="128KB", block_size=8) as engine:
        hold_long_answers(engine)
        engine.submit(PROMPT, LONG, on_event=seen.append)
    last = told(seen)
    assert last.finish_reason is FinishReason.ERROR and isinstance(last.error, EngineClosed)


def test_a_request_that_cannot_be_queued_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    other = engine.submit(PROMPT, LONG)
    next(iter(other))
    fail_once(engine._worker.core.scheduler, "add", 1, monkeypatch)
    with pytest.raises(CortexError, match="it broke"):
        engine.submit(PROMPT, SHORT).result(PATIENCE)
    assert len(other.result(PATIENCE).token_ids) == 400
    finally_nothing_lost(engine)


# -- closed -----------------------------------------------------------------------------------------------------------


def test_close_fails_what_is_in_flight_and_refuses_what_comes(tiny: Any) -> None:
    engine = Engine(tiny("one layer"), kv_memory="128KB", block_size=8, max_rows=2)
    hold_long_answers(engine)
    handles = [engine.submit(PROMPT, LONG) for _ in range(4)]
    next(iter(handles[0]))
    engine.close()
    engine.close()
    for handle in handles:
        with pytest.raises(EngineClosed):
            handle.result(PATIENCE)
        with pytest.raises(EngineClosed):
            list(handle)
        handle.cancel()
    for refused in (engine.stats, lambda: engine.generate(PROMPT), lambda: engine.submit(PROMPT)):
        with pytest.raises(EngineClosed):
            refused()


def test_an_engine_that_is_dropped_closes_after_its_last_request(tiny: Any) -> None:
    engine = Engine(tiny("one layer"), kv_memory="128KB", block_size=8)
    dropped, worker = weakref.ref(engine), engine._worker
    handles = [engine.submit(PROMPT, SHORT), engine.submit(PROMPT, LONG)]
    del engine
    assert [len(h.result(PATIENCE).token_ids) for h in handles] == [12, 400]
    worker._task.join()
    assert dropped() is None
    with pytest.raises(EngineClosed):
        worker.ask(lambda core: core.stats())


def test_an_engine_that_is_dropped_before_it_was_asked_closes_at_once(tiny: Any) -> None:
    worker = Engine(tiny("one layer"), kv_memory="128KB", block_size=8)._worker
    worker._task.join()


def test_an_engine_that_is_collected_while_its_thread_holds_the_lock_closes(tiny: Any) -> None:
    """Python collects garbage on whatever thread allocates next, the engine's own as well."""
    program = """
import faulthandler, gc
faulthandler.dump_traceback_later(PATIENCE, exit=True)
gc.disable()
held = engine()
worker, held.itself = held._worker, held

class Handles(type(worker._handles)):
    def values(self):
        gc.collect()
        return super().values()

worker._handles = Handles()
del held
worker.stop()
print("closed")
"""
    assert outcome(program, tiny("one layer")) == (0, "closed\n", "")


ASKING = [
    "stats()",
    "inspect(id)",
    "on_memory_pressure('critical')",
    "generate([1, 2])",
    "generate_batch([[1], [2]])",
    "submit([1]).result()",
    "pin([1] * 20)",
    "perplexity([1] * 20)",
    "conversation().ask('hi')",
]
"""What waits for the engine's thread."""


def test_a_listener_that_asks_its_own_engine_is_refused_and_does_not_hang(tiny: Any) -> None:
    program = f"""
import faulthandler
from cortexmlx import CortexError
faulthandler.dump_traceback_later(PATIENCE, exit=True)
seen = []

def listen(event):
    if event.completion is None:
        return
    try:
        eval("e." + call)
    except CortexError as error:
        seen.append(str(error))
        seen.append(e.submit([4], SamplingParams(max_tokens=1)))

with engine() as e:
    for call in {ASKING!r}:
        e.submit([1, 2, 3], SamplingParams(max_tokens=3), listener=listen).result()
        eval("e." + call)
        message, later = seen
        print(call, message.split(",")[0], later.result().usage.prompt_tokens, sep=": ", flush=True)
        seen.clear()
"""
    refused = "".join(f"{call}: the engine's own thread cannot ask the engine: 1\n" for call in ASKING)
    assert outcome(program, tiny("one layer")) == (0, refused, "")
