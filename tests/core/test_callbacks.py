"""`on_event` is told of everything, in order: of failures, of a close, and of the end of the program. However many
requests there are, a few threads do it, and a function that takes its time holds up no other.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from cortexmlx import Completion, CortexError, Engine, FinishReason, Progress, Timings, TokenEvent, Usage
from cortexmlx.core import callbacks
from cortexmlx.core.callbacks import CallbackThreads
from cortexmlx.core.handle import RequestHandle
from support.engine.asked import LONG, PROMPT, SHORT
from support.engine.core_driver import finally_nothing_lost
from support.engine.held import hold_long_answers
from support.patience import PATIENCE, soon
from support.programs import outcome


def test_a_callback_may_ask_and_close_the_engine(engine: Engine) -> None:
    done = threading.Event()
    answers: list[Any] = []

    def listen(event: TokenEvent) -> None:
        if event.completion is not None:
            answers.append(engine.generate(PROMPT, SHORT).token_ids)
            engine.close()
            done.set()

    first = engine.submit(PROMPT, SHORT, on_event=listen).result(PATIENCE)
    assert done.wait(PATIENCE) and answers == [first.token_ids]


@pytest.mark.parametrize("how", [pytest.param("e.close()", marks=pytest.mark.slow), ""])
def test_a_program_that_ends_tells_of_it(tiny: Any, how: str) -> None:
    """Its engine closed, or left alone: whoever listens hears the end before the interpreter is gone."""
    program = f"""
def listen(event):
    if event.error or event.completion:
        print(type(event.error).__name__, event.finish_reason.value)
from support.engine.held import hold_long_answers
e = engine()
hold_long_answers(e)
h = e.submit([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True), on_event=listen)
next(iter(e.stream([1, 2, 3])))
{how}
"""
    code, output, errors = outcome(program, tiny("llama"))
    assert (code, output, errors) == (0, "EngineClosed error\n", "")


@pytest.mark.slow
def test_whatever_a_callback_raises_nothing_is_printed(tiny: Any) -> None:
    program = """
import threading
for kind in (KeyboardInterrupt, SystemExit, GeneratorExit, ValueError):
    begun = threading.Event()
    def listen(event):
        begun.set()
        raise kind("mine")
    with engine() as e:
        answer = e.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), on_event=listen).result()
        begun.wait()
    print(kind.__name__, len(answer.token_ids))
"""
    said = "KeyboardInterrupt 4\nSystemExit 4\nGeneratorExit 4\nValueError 4\n"
    assert outcome(program, tiny("llama")) == (0, said, "")


# -- the threads alone ------------------------------------------------------------------------------------------------

END = TokenEvent("", completion=Completion("t", (1,), FinishReason.LENGTH, Usage(1, 1), Timings(0, 0, 0, 0, 0)))


def telling() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cortexmlx-events"]


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> Iterator[CallbackThreads]:
    """Threads that lose their patience quickly: three at most tell, but for those that take 0.1 s for a call."""
    for name, value in {"MAX_THREADS": 3, "SLOW_SECONDS": 0.1, "WAIT_SECONDS": 0.02}.items():
        monkeypatch.setattr(callbacks, name, value)
    assert soon(lambda: not telling())
    callers = CallbackThreads()
    yield callers
    callers.join(PATIENCE)
    assert soon(lambda: not telling()), "all end with the last request"


class Ear:
    """What was heard of one request, by a function that waits for `may` before it returns."""

    def __init__(self, may: threading.Event | None = None) -> None:
        self.handle = RequestHandle(1, lambda request: None)
        self.heard: list[TokenEvent] = []
        self._may = may

    def __call__(self, event: TokenEvent) -> None:
        self.heard.append(event)
        if self._may is not None:
            self._may.wait(PATIENCE)


def test_thousands_that_wait_take_two_threads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "WAIT_SECONDS", PATIENCE)  # on a busy machine an event may wait for long
    ended = threading.Semaphore(0)

    def listen(event: TokenEvent) -> None:
        if event.completion is not None:
            ended.release()

    most = 0
    handles = []
    for _ in range(300):
        handles.append(engine.submit([1, 2, 3], SHORT, on_event=listen))
        most = max(most, len(telling()))
    for handle in handles:
        handle.cancel()
    assert all(ended.acquire(timeout=PATIENCE) for _ in handles)
    assert most == 2, "one that tells, one that looks whether somebody waits for it"
    assert soon(lambda: not telling())


def test_a_function_that_never_returns_holds_up_nobody(callers: CallbackThreads) -> None:
    """More of them than may be told at once. Threads go when they are not needed any more."""
    may = threading.Event()
    stuck, quick = [Ear(may) for _ in range(8)], [Ear() for _ in range(8)]
    for ear in [*stuck, *quick]:
        callers.subscribe(ear.handle, ear)
    for ear in [*stuck, *quick]:
        ear.handle.push(TokenEvent("a", 1))
        ear.handle.push(TokenEvent("b", 2))
    assert soon(lambda: all(len(ear.heard) == 2 for ear in quick)), "they hear nothing while others do not return"
    assert soon(lambda: all(len(ear.heard) == 1 for ear in stuck)) and len(telling()) >= 1 + 8
    may.set()
    assert soon(lambda: all(len(ear.heard) == 2 for ear in stuck))
    assert soon(lambda: len(telling()) == 2)
    for ear in [*stuck, *quick]:
        ear.handle.push(END)
    assert soon(lambda: all(len(ear.heard) == 3 for ear in [*stuck, *quick]))


def test_a_function_may_wait_for_what_another_requests_does(callers: CallbackThreads) -> None:
    may = threading.Event()
    waits, lets_go = Ear(may), RequestHandle(2, lambda request: None)
    callers.subscribe(waits.handle, waits)
    callers.subscribe(lets_go, lambda event: may.set())
    waits.handle.push(END)
    assert soon(lambda: waits.heard)
    lets_go.push(END)
    assert may.wait(PATIENCE)


def test_slow_functions_are_called_by_several_threads_but_not_by_more_than_allowed(
    callers: CallbackThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "SLOW_SECONDS", PATIENCE)
    may = threading.Event()
    ears = [Ear(may) for _ in range(8)]
    for ear in ears:
        callers.subscribe(ear.handle, ear)
        ear.handle.push(END)
    assert soon(lambda: sum(len(ear.heard) for ear in ears) == callbacks.MAX_THREADS)
    time.sleep(0.2)
    assert sum(len(ear.heard) for ear in ears) == callbacks.MAX_THREADS and len(telling()) == callbacks.MAX_THREADS + 1
    may.set()
    assert soon(lambda: all(len(ear.heard) == 1 for ear in ears))


@pytest.mark.parametrize("put", [False, True])
def test_an_interrupt_at_the_engines_thread_while_it_pushes_loses_no_event(callers: CallbackThreads, put: bool) -> None:
    """It lands before an event is announced, or right behind that; whoever is interrupted fails its requests."""

    class Interrupted(queue.SimpleQueue):  # type: ignore[type-arg]
        """Its third item interrupts whoever puts it."""

        count = 0

        def put(self, item: Any) -> None:  # type: ignore[override]
            self.count += 1
            if self.count != 3 or put:
                super().put(item)
            if self.count == 3:
                raise KeyboardInterrupt

    callers._ready_queue = Interrupted()
    ear = Ear()
    callers.subscribe(ear.handle, ear)
    assert len(telling()) == 1, "a request that is alone holds up nobody"
    for index in range(3):
        try:
            ear.handle.push(TokenEvent(str(index), index))
        except KeyboardInterrupt:
            ear.handle.fail(CortexError("interrupted"))
    assert soon(lambda: len(ear.heard) == 4)
    assert [event.token_id for event in ear.heard] == [0, 1, 2, None] and ear.heard[3].error is not None


def test_where_no_thread_is_to_be_had_nothing_is_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    assert soon(lambda: not telling())
    hold_long_answers(engine)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="thread"):
            engine.submit(PROMPT, LONG, on_event=print)
    finally_nothing_lost(engine)
    ear = Ear()
    engine.submit(PROMPT, SHORT, on_event=ear)
    assert soon(lambda: ear.heard and ear.heard[-1].completion)


def test_quick_functions_with_too_much_to_hear_do_not_have_ever_more_threads(
    callers: CallbackThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "SLOW_SECONDS", PATIENCE)
    monkeypatch.setattr(callbacks, "WAIT_SECONDS", 0.001)
    counts: list[int] = []
    ears = [Ear() for _ in range(2)]
    for ear in ears:
        for _ in range(4000):
            ear.handle.push(TokenEvent("a", 1))
        ear.handle.push(END)
        callers.subscribe(ear.handle, ear)
    while callers._open:
        counts.append(len(telling()))
        time.sleep(0.002)
    assert max(counts) <= callbacks.MAX_THREADS + 1
    assert [len(ear.heard) for ear in ears] == [4001] * 2


def test_a_request_that_ends_while_there_was_nothing_to_tell_is_told_of_it(callers: CallbackThreads) -> None:
    """Events of progress give way to newer ones, so that a thread may come for one that is not there any more."""

    class Ending(RequestHandle):
        def take(self) -> TokenEvent | None:
            event = super().take()
            if event is None and not self.ended:
                self.push(END)
            return event

    may = threading.Event()
    ear = Ear(may)
    ear.handle = Ending(1, lambda request: None)
    callers.subscribe(ear.handle, ear)
    for done in range(3):
        ear.handle.push(TokenEvent("", progress=Progress("prefilling", done, 9)))
        assert soon(lambda: ear.heard)
    may.set()
    assert soon(lambda: ear.heard[-1] is END)
    assert [event.progress.done for event in ear.heard[:-1] if event.progress] == [0, 2]


def test_who_iterates_over_the_handle_takes_events_but_not_the_last(callers: CallbackThreads) -> None:
    may = threading.Event()
    ear = Ear(may)
    callers.subscribe(ear.handle, ear)
    ear.handle.push(TokenEvent("a", 1))
    assert soon(lambda: ear.heard)
    ear.handle.push(TokenEvent("b", 2))
    ear.handle.push(END)
    assert [event.text for event in ear.handle] == ["b", ""]
    may.set()
    assert soon(lambda: ear.heard[-1] is END)


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_while_a_thread_is_started_keeps_nobody_from_being_told(
    callers: CallbackThreads, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        if begun:
            start(thread)
        raise KeyboardInterrupt

    ears, start = [Ear(), Ear()], threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            callers.subscribe(ears[0].handle, ears[0])
    assert soon(lambda: not telling())
    callers.subscribe(ears[1].handle, ears[1])
    for ear in ears:
        ear.handle.push(END)
    assert soon(lambda: ears[1].heard == [END])
    assert not ears[0].heard, "its caller has no handle"


def test_nothing_is_kept_of_requests_that_have_ended(callers: CallbackThreads) -> None:
    def ask() -> weakref.ref[Ear]:
        ear = Ear()
        callers.subscribe(ear.handle, ear)
        for done in range(50):
            ear.handle.push(TokenEvent("", progress=Progress("prefilling", done, 9)))
        ear.handle.push(END)
        assert soon(lambda: ear.heard and ear.heard[-1] is END)
        return weakref.ref(ear)

    other = Ear()
    callers.subscribe(other.handle, other)
    asked = ask()
    assert soon(lambda: asked() is None), "while others are told"
    other.handle.push(END)
    asked = ask()
    assert soon(lambda: asked() is None), "and when there are none"
