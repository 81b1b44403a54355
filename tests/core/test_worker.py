"""The engine's thread between two steps, with a core that computes nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.handle import RequestHandle
from cortexmlx.core.text import StopConditions
from cortexmlx.core.worker import Submission, Worker
from cortexmlx.errors import EngineClosed
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams
from support.patience import PATIENCE

ENOUGH = 20
"""Steps that are seen while calls never end."""

"""Seconds until a test gives up waiting for them."""


class FakeCore:
    """A core that counts. It has work for ever once a request has come, and answers none."""

    def __init__(self, config: Any, wake: Any, waiting: Any) -> None:
        self.idle, self.seconds_to_deadline = True, None
        self.waiting = waiting
        self.steps = 0
        self.cancelled: list[int] = []
        self.enough = threading.Event()

    def add(self, request: Any, handle: Any, stops: Any, grammar: Any = None) -> None:
        self.idle = False

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)

    def step(self) -> None:
        self.steps += 1
        if self.steps >= ENOUGH:
            self.enough.set()

    def tidy(self) -> bool:
        """Nothing to tidy."""
        return False

    def fail_all(self, error: Exception) -> None:
        """Nothing to fail: the worker fails the handles."""

    def release(self) -> None:
        """Nothing to release."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr("cortexmlx.core.core.EngineCore", FakeCore)
    worker = Worker(EngineConfig("none"))
    worker.start()
    yield worker
    worker.stop()


def submit(worker: Worker) -> RequestHandle:
    handles: list[RequestHandle] = []
    worker.submit([Submission(QueuedRequest((1,), SamplingParams()), StopConditions())], handles)
    return handles[0]


def test_a_core_is_told_whether_somebody_waits_for_it(worker: Worker) -> None:
    """While it opens, it then times nothing."""
    core: Any = worker.core
    assert not core.waiting()
    submit(worker)
    assert core.waiting()


def test_an_engine_that_is_to_end_is_waited_for(worker: Worker) -> None:
    core: Any = worker.core
    worker.request_stop()
    assert core.waiting()


def test_steps_are_taken_while_calls_never_end(worker: Worker) -> None:
    """Each call leaves another one behind, so the queue is never empty."""
    core: Any = worker.core
    end = time.monotonic() + PATIENCE

    def call(core: Any) -> None:
        if not core.enough.is_set() and time.monotonic() < end:
            worker._calls.put(call)

    submit(worker)
    worker._calls.put(call)
    worker.ask(lambda core: None)
    assert core.enough.wait(PATIENCE)
    assert time.monotonic() < end, "the steps came after the calls"


def test_who_submits_in_a_loop_waits_for_the_engine_and_a_cancel_is_never_far(worker: Worker) -> None:
    core: Any = worker.core
    submit(worker)
    stop = threading.Event()
    refused: list[EngineClosed] = []

    def flood() -> None:
        try:
            while not stop.is_set():
                submit(worker)
        except EngineClosed as error:
            refused.append(error)

    core.step = lambda: time.sleep(0.01)
    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    longest = 0
    for _ in range(ENOUGH):
        time.sleep(0.01)
        longest = max(longest, worker._calls.qsize())
    wanted = submit(worker)
    wanted.cancel()
    wanted.cancel()
    deadline = time.monotonic() + PATIENCE
    while wanted.id not in core.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)
    assert core.cancelled == [wanted.id]
    assert longest <= 64

    worker.stop()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(refused) == 4, "closing wakes everybody who waits to submit"


@pytest.mark.parametrize("taken", [True, False], ids=["after it got its permit", "before"])
def test_an_interrupt_of_who_waits_to_submit_loses_no_permit_and_makes_none(worker: Worker, taken: bool) -> None:
    """Python tells nobody which of the two it was."""

    class Interrupted(queue.SimpleQueue[None]):
        def get(self, *args: Any, **options: Any) -> Any:
            if taken:
                super().get(*args, **options)
            raise KeyboardInterrupt

    usual = worker._permits
    worker._permits = Interrupted()
    count = usual.qsize()
    for _ in range(count):
        worker._permits.put(usual.get())
    for _ in range(count):
        with pytest.raises(KeyboardInterrupt):
            submit(worker)
    assert worker._permits.qsize() == count


def test_an_interrupt_of_who_asks_leaves_no_question_behind(worker: Worker) -> None:
    class Interrupted(queue.SimpleQueue[Any]):
        def put(self, *args: Any) -> Any:
            raise KeyboardInterrupt

    usual = worker._calls
    worker._calls = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        worker.ask(lambda core: None)
    worker._calls = usual
    assert not worker._pending_answers


def test_an_idle_engine_wakes_up_when_a_request_is_late(worker: Worker) -> None:
    """As while all requests wait for the disk, or for lost workers: no call comes."""
    core: Any = worker.core
    worker.ask(lambda core: setattr(core, "seconds_to_deadline", 0.001))
    assert core.enough.wait(PATIENCE)


@pytest.fixture
def little_time_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CALLS_SECONDS", "_TOGETHER_SECONDS"):
        monkeypatch.setattr(f"cortexmlx.core.worker.{name}", 1e-5)


def test_a_burst_at_an_idle_engine_is_taken_before_its_first_step(little_time_for_calls: None, worker: Worker) -> None:
    """However long that takes: nothing runs that would have to wait."""
    core: Any = worker.core
    burst_is_here, left = threading.Event(), []
    core.step = lambda: (left.append(worker._calls.qsize()), time.sleep(0.01))
    worker._calls.put(lambda core: burst_is_here.wait(PATIENCE))
    for _ in range(50):  # fewer than may wait to be taken
        submit(worker)
    burst_is_here.set()
    end = time.monotonic() + PATIENCE
    while not left and time.monotonic() < end:
        time.sleep(0.01)
    assert left and left[0] == 0
