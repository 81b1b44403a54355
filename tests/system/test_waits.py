"""A signal ends a wait, also if the system gives it to another thread, or it comes just before the wait begins."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cortexmlx.core.as_completed import AsCompleted
from cortexmlx.core.handle import RequestHandle
from cortexmlx.system.waits import take_next, wait_until
from cortexmlx.types.request import RequestId
from support.patience import PATIENCE


class Ended(Exception):
    """What the handler of the signal raises."""


def _never() -> None:
    changed = threading.Condition()
    with changed:
        wait_until(changed, lambda: False)


def _handle() -> RequestHandle:
    return RequestHandle(RequestId(1), lambda request: None)


def _completed() -> Any:
    submit: Any = lambda checked, handles: handles.extend(_handle() for _ in checked)  # noqa: E731
    return next(AsCompleted(iter([("a", None)]), lambda prompt, params, listener: prompt, submit, ahead=4))


@pytest.mark.parametrize(
    "wait",
    [_never, lambda: take_next(queue.SimpleQueue()), lambda: _handle().wait(), lambda: _handle().result(), _completed],
    ids=["condition", "queue", "event", "result", "as_completed"],
)
def test_a_signal_that_interrupts_no_lock_ends_a_wait(wait: Callable[[], object]) -> None:
    def end(number: int, frame: object) -> None:
        raise Ended

    gave_up = threading.Event()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        if not over.wait(PATIENCE):  # the wait goes on: this signal does interrupt it
            gave_up.set()
            signal.pthread_kill(main, signal.SIGUSR2)

    main, over = threading.get_ident(), threading.Event()
    before = {number: signal.signal(number, end) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    other = threading.Timer(0.05, interrupt)
    other.start()  # before the signal is blocked here, so this thread gets it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with pytest.raises(Ended):
            wait()
    finally:
        over.set()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        other.join()
        for number, usual in before.items():
            signal.signal(number, usual)
    assert not gave_up.is_set()


def test_a_wait_ends_with_its_condition_and_with_its_time() -> None:
    changed, there = threading.Condition(), threading.Event()

    def change() -> None:
        with changed:
            there.set()
            changed.notify_all()

    with changed:
        assert not wait_until(changed, there.is_set, 0.0)
        assert not wait_until(changed, there.is_set, 0.3)
        threading.Timer(0.3, change).start()
        assert wait_until(changed, there.is_set)


def test_items_are_taken_in_order() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(3):
        items.put(number)
    assert [take_next(items) for _ in range(3)] == [0, 1, 2]
    threading.Timer(0.3, items.put, [7]).start()
    assert take_next(items) == 7
