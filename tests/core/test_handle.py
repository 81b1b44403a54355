"""A request as its caller sees it: its events, its end, and who is told of it."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.core.handle import RequestHandle
from cortexmlx.errors import CortexError, EngineClosed, ForkedProcess, KVCacheFull
from cortexmlx.types.request import Completion, FinishReason, RequestState, Timings, TokenEvent, Usage
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import finally_nothing_lost
from support.patience import PATIENCE

# -- the handle alone -------------------------------------------------------------------------------------------------


def ended(reason: FinishReason = FinishReason.LENGTH) -> TokenEvent:
    return TokenEvent("", completion=Completion("text", (1,), reason, Usage(1, 1), Timings(0, 0, 0, 0, 0)))


def handle_of(listener: Callable[[TokenEvent], None] | None = None, owner: object = None) -> tuple[RequestHandle, Any]:
    cancelled: list[int] = []
    return RequestHandle(7, cancelled.append, listener, owner), cancelled


def test_events_come_in_their_order_to_whoever_waits_in_another_thread() -> None:
    handle, _ = handle_of()
    read: list[TokenEvent] = []
    reader = threading.Thread(target=lambda: read.extend(handle), daemon=True)
    reader.start()
    events = [TokenEvent(str(i), i) for i in range(50)]
    for event in events:
        handle.push(event)
    assert not handle.ended
    handle.push(last := ended())
    reader.join(PATIENCE)
    assert read == [*events, last] and handle.result(0) is last.completion
    assert list(handle) == [], "each event is read once"


def test_a_result_is_waited_for_as_long_as_was_said() -> None:
    handle, _ = handle_of()
    handle.advance(RequestState.PREFILLING)
    with pytest.raises(TimeoutError, match="request 7 is still prefilling after"):
        handle.result(0.01)
    timer = threading.Timer(0.05, handle.push, [ended()])
    timer.start()
    assert handle.result(PATIENCE).text == "text"


@pytest.mark.parametrize(
    ("reason", "state"),
    [(FinishReason.CANCELLED, RequestState.CANCELLED), (FinishReason.STOP, RequestState.FINISHED)],
)
def test_a_completion_ends_the_request(reason: FinishReason, state: RequestState) -> None:
    handle, cancelled = handle_of()
    handle.push(ended(reason))
    assert (handle.state, handle.ended) == (state, True)
    handle.cancel()
    assert cancelled == [], "there is nothing left to cancel"


def test_it_is_cancelled_once() -> None:
    handle, cancelled = handle_of()
    handle.cancel()
    handle.cancel()
    assert cancelled == [7] and not handle.ended, "the engine says when it has ended"


def test_an_error_is_raised_after_the_events_before_it() -> None:
    handle, _ = handle_of()
    handle.push(TokenEvent("a", 1))
    handle.fail(KVCacheFull("full"))
    handle.fail(EngineClosed("closed"))
    read = []
    with pytest.raises(KVCacheFull, match="full"):
        read.extend(event.text for event in handle)
    for _ in range(2):
        with pytest.raises(KVCacheFull, match="full"):
            handle.result(0)
    assert handle.state is RequestState.FAILED


def test_a_request_that_has_finished_cannot_fail() -> None:
    told: list[TokenEvent] = []
    handle, _ = handle_of(told.append)
    handle.push(last := ended())
    handle.fail(EngineClosed("closed"))
    assert handle.result(0) is last.completion and told == [last]


def test_a_listener_that_raises_is_told_only_of_the_end(caplog: pytest.LogCaptureFixture) -> None:
    told: list[TokenEvent] = []

    def listen(event: TokenEvent) -> None:
        told.append(event)
        raise ZeroDivisionError

    handle, _ = handle_of(listen)
    events = [TokenEvent("a", 1), TokenEvent("b", 2), TokenEvent("c", 3)]
    for event in events:
        handle.push(event)
    assert told == events[:1] and "request 7" in caplog.text
    handle.fail(KVCacheFull("full"))
    assert len(set(told[1:])) == 1 and isinstance(told[1].error, KVCacheFull) and len(caplog.records) == 1
    assert [e.text for e in itertools.islice(handle, 3)] == ["a", "b", "c"], "who reads them gets all"


@pytest.mark.parametrize("interrupts", [0, 1, 2])
def test_an_interrupt_while_it_is_told_of_the_end_is_no_reason_not_to_tell_it(interrupts: int) -> None:
    told: list[TokenEvent] = []

    def listen(event: TokenEvent) -> None:
        told.append(event)
        if len(told) <= interrupts:
            raise KeyboardInterrupt

    handle, _ = handle_of(listen)
    handle.push(last := ended())
    assert told == [last] * (interrupts + 1)


def test_an_interrupt_while_it_is_told_of_a_token_ends_its_request_and_no_step() -> None:
    """What it has heard is not known: a stream would have a hole."""
    told: list[TokenEvent] = []

    def listen(event: TokenEvent) -> None:
        told.append(event)
        if event.error is None:
            raise KeyboardInterrupt

    handle, cancelled = handle_of(listen)
    handle.push(TokenEvent("a", 1))
    assert cancelled == [7] and handle.state is RequestState.FAILED
    assert [event.finish_reason for event in told] == [None, FinishReason.ERROR]
    handle.push(TokenEvent("b", 2))
    handle.push(ended())
    assert len(told) == 2 and handle.state is RequestState.FAILED
    with pytest.raises(CortexError, match="KeyboardInterrupt"):
        handle.result(0)


@pytest.mark.parametrize("end", [lambda h: h.push(ended()), lambda h: h.fail(KVCacheFull("full"))])
def test_the_owner_is_kept_until_the_end(end: Callable[[RequestHandle], None]) -> None:
    class Owner:
        """Something that a weak reference can look at."""

    owner = Owner()
    handle, _ = handle_of(lambda event: None, owner)
    kept = weakref.ref(owner)
    del owner
    handle.push(TokenEvent("a", 1))
    gc.collect()
    assert kept() is not None
    end(handle)
    gc.collect()
    assert kept() is None


def test_a_copy_in_a_forked_child_raises_though_its_lock_is_held_and_tells_nobody() -> None:
    told: list[TokenEvent] = []
    handle, _ = handle_of(told.append)
    handle._lock.acquire()
    handle.abandon(ForkedProcess("forked"))
    with pytest.raises(ForkedProcess):
        handle.result(0)
    with pytest.raises(ForkedProcess):
        list(handle)
    assert told == []


# -- What there is one of says so, to who copies it, sends it to another process, or prints it ------------------------


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_an_engine_nor_what_it_gave_is_copied(engine: Engine, how: Callable[[Any], Any]) -> None:
    """Nor is anything cancelled by a copy that is dropped."""
    stream = engine.stream(PROMPT, SHORT)
    for each in (engine, engine.submit(PROMPT, SHORT), stream, engine.astream(PROMPT), engine.as_completed([PROMPT])):
        with pytest.raises(TypeError, match=f"{type(each).__name__} objects cannot be copied, pickled or.*Make an Eng"):
            how(each)
    gc.collect()
    assert sum(event.token_id is not None for event in stream) == 12
    finally_nothing_lost(engine)


def test_what_is_printed_says_which_it_is_and_how_far(engine: Engine) -> None:
    name = engine.info.name
    handle = engine.submit(PROMPT, LONG)
    next(iter(handle))
    stream = engine.stream(PROMPT, SHORT)
    assert (repr(engine), repr(handle)) == (f"<Engine {name}>", f"<RequestHandle {handle.id}: decoding>")
    assert repr(engine.pin([1] * 20)) == "<Pin: 16 tokens>"
    handle.cancel()
    handle.result(PATIENCE)
    assert repr(handle) == f"<RequestHandle {handle.id}: cancelled>"
    list(stream)
    assert repr(stream) == f"<TokenStream of <RequestHandle {handle.id + 1}: finished>>"
    assert max(len(repr(look)) for look in (engine.blocks(), engine.stats())) < 3000
    engine.close()
    assert repr(engine) == f"<Engine {name}, closed>"


def test_a_subclass_that_has_not_begun_is_printed(tiny: Any) -> None:
    class Mine(Engine):
        def __init__(self) -> None:
            assert repr(self) == "<Mine, closed>"
            super().__init__(tiny("one layer"), kv_memory="64KB", block_size=8)

    with Mine() as mine:
        assert repr(mine).startswith("<Mine /") and mine.generate(PROMPT, SHORT).token_ids
