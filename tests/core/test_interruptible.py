"""A prompt that is never read: its caller's time holds, the event loop goes on, and its thread ends."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cortexmlx import ChatPrompt, Engine, InvalidRequest, RequestTimeout, SamplingParams
from cortexmlx.core.blocking_calls import InterruptibleCall, tokenize_with_timeout
from support.engine.asked import SHORT
from support.engine.core_driver import assert_nothing_lost
from support.patience import PATIENCE, soon

LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
ASKED = [{"role": "user", "content": "hi"}]


def alive() -> list[threading.Thread]:
    """The threads of ours that read prompts."""
    return [t for t in threading.enumerate() if t.name in ("cortexmlx-prompt", "cortexmlx-async")]


def all_end() -> bool:
    return soon(lambda: not alive())


def for_ever() -> None:
    while True:
        pass


@pytest.fixture
def looping(engine: Engine) -> Iterator[Engine]:
    """An engine whose model's chat template never ends."""
    engine._tokenizer._tokenizer.chat_template = LOOPS
    yield engine
    assert all_end() and soon(lambda: not engine.stats().kv_bytes_in_use)
    assert_nothing_lost(engine.stats())


CALLS: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda e: e.generate(ASKED, SHORT, timeout=0.2),
    "a ChatPrompt": lambda e: e.generate(ChatPrompt(ASKED), SHORT, timeout=0.2),
    "astream": lambda e: asyncio.run(anext(e.astream(ASKED, SHORT, timeout=0.2))),
    "aask": lambda e: asyncio.run(e.conversation().aask("hi", timeout=0.2)),
}


def test_the_time_of_a_conversations_template_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, given = engine.submit, []

    def submit_noted(*values: Any, **options: Any) -> Any:
        given.append(options["timeout"])
        return submit(*values, **options)

    clock = SimpleNamespace(monotonic=iter((10.0, 13.0)).__next__)
    monkeypatch.setattr(engine, "submit", submit_noted)
    monkeypatch.setattr("cortexmlx.sessions.conversation.time", clock)
    engine.conversation().ask("hi", SHORT, timeout=PATIENCE)
    assert given == [PATIENCE - 3]


@pytest.mark.parametrize("call", CALLS)
def test_a_timeout_holds_while_a_chat_template_loops(looping: Engine, call: str) -> None:
    with pytest.raises(RequestTimeout, match=r"after 0\.2 s, so the request was not queued: the model's chat template"):
        CALLS[call](looping)


def test_a_batch_goes_on_after_a_prompt_that_is_never_read(looping: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortexmlx.core.core.time", SimpleNamespace(perf_counter=lambda: 0.0))  # none is late
    results = dict(looping.as_completed([ASKED, [1, 2, 3]], SHORT, timeout=0.2))
    assert isinstance(results[0], RequestTimeout) and len(results[1].token_ids) == SHORT.max_tokens


@pytest.mark.parametrize("call", ["agenerate", "aask"])
def test_the_event_loop_goes_on_while_a_chat_template_loops_and_a_cancelled_task_ends_it(
    looping: Engine, call: str
) -> None:
    asked = (looping.agenerate if call == "agenerate" else looping.conversation().aask)(ASKED, SHORT)

    async def give_up() -> None:
        task = asyncio.ensure_future(asked)
        while not alive():
            await asyncio.sleep(0.001)
        other = await looping.agenerate([1, 2, 3], SHORT)
        assert len(other.token_ids) == SHORT.max_tokens and not task.done() and alive()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())


def test_closing_does_not_wait_for_a_chat_template(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny("llama"), kv_memory="256KB")
    engine._tokenizer._tokenizer.chat_template = LOOPS
    failed: list[BaseException] = []
    begun, closed = threading.Event(), threading.Event()
    result = InterruptibleCall.result

    def wait(call: InterruptibleCall[Any], seconds: float) -> Any:
        begun.set()
        assert closed.wait(PATIENCE)
        return result(call, 0.01)

    monkeypatch.setattr(InterruptibleCall, "result", wait)

    def ask() -> None:
        try:
            engine.generate(ASKED, SHORT, timeout=1)
        except RequestTimeout as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(PATIENCE) and alive()
    engine.close()
    closed.set()
    asking.join(PATIENCE)
    assert len(failed) == 1 and all_end()


def test_short_texts_and_tokens_need_no_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterruptibleCall, "__init__", lambda *_: pytest.fail("a thread was begun"))
    for prompt in ("hi", [1, 2, 3], (1, 2, 3)):
        assert engine.generate(prompt, SHORT, timeout=PATIENCE).token_ids
        assert asyncio.run(engine.agenerate(prompt, SHORT)).token_ids
    assert engine.generate(ASKED, SHORT).token_ids, "without a limit the caller's own thread reads it"


def test_a_call_returns_and_raises_what_it_does(engine: Engine) -> None:
    assert InterruptibleCall(lambda: 5, "a test").result(PATIENCE) == 5
    with pytest.raises(ZeroDivisionError):
        InterruptibleCall(lambda: 1 / 0, "a test").result(PATIENCE)
    assert engine.generate(ASKED, SHORT, timeout=PATIENCE) is not None
    with pytest.raises(InvalidRequest, match="timeout is 'x'"):
        tokenize_with_timeout("x", lambda: 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no role"):
        engine.generate([{"role": "", "content": "a"}], SamplingParams(), timeout=PATIENCE)


def test_an_interrupted_call_ends_and_one_that_has_ended_is_left_alone() -> None:
    call = InterruptibleCall(for_ever, "a test")
    with pytest.raises(queue.Empty):
        call.result(0.01)
    call._thread.join(PATIENCE)
    assert not call._thread.is_alive()
    done = InterruptibleCall(lambda: 5, "a test")
    done._thread.join(PATIENCE)
    for each in (call, done):
        each.interrupt()
    assert done.result(PATIENCE) == 5


def test_many_that_are_given_up_at_any_moment_leave_no_thread() -> None:
    """At the end of the call, too, where it takes its lock."""
    for number in range(200):
        call = InterruptibleCall(lambda count=number: sum(range(count * 20)), "a test")
        time.sleep(number % 7 / 20_000)
        call.interrupt()
        call._thread.join(PATIENCE)
        assert not call._thread.is_alive()
