"""Threads that own mlx: they are kept, whatever a task does."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from cortexmlx.errors import ForkedProcess
from cortexmlx.serving import threads
from cortexmlx.serving.threads import Task


def test_a_task_that_raises_is_begun_again_on_the_same_thread() -> None:
    seen: list[tuple[int, BaseException | None]] = []
    interrupts = [KeyboardInterrupt(), SystemExit(), GeneratorExit()]

    def run(raised: BaseException | None) -> None:
        seen.append((threading.get_ident(), raised))
        if len(seen) <= len(interrupts):
            raise interrupts[len(seen) - 1]

    task = Task(run)
    task.start()
    task.join()
    assert [raised for _, raised in seen] == [None, *interrupts]
    assert len({thread for thread, _ in seen}) == 1 and not task.running


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "cortexmlx-engine"}


def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never comes true")


def test_a_thread_that_has_done_its_work_takes_the_next_task() -> None:
    before, used = engine_threads(), set[threading.Thread]()
    for _ in range(20):
        task = Task(lambda raised: used.add(threading.current_thread()))
        task.start()
        task.join()
        until(lambda: used <= set(threads._parked))
    assert len(engine_threads() - before) <= 1, "a new one only where none is parked"
    assert all(thread.daemon and thread.is_alive() for thread in used)


def test_two_tasks_at_once_have_a_thread_each() -> None:
    met = threading.Barrier(2)
    where: list[int] = []

    def run(raised: BaseException | None) -> None:
        met.wait(10)
        where.append(threading.get_ident())

    tasks = [Task(run), Task(run)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert len(set(where)) == 2 and threading.get_ident() not in where


def test_a_task_runs_until_it_returns_and_knows_its_own_thread() -> None:
    begin, here = threading.Event(), list[bool]()
    task = Task(lambda raised: (begin.wait(10), here.append(task.here()))[1])
    assert not task.running and not task.here()
    task.start()
    assert task.running and not task.here()
    begin.set()
    task.join()
    task.join()
    assert not task.running and here == [True]


def test_a_task_that_is_abandoned_is_over_for_whoever_waits() -> None:
    """As in a forked child, where its thread is not."""
    release = threading.Event()
    task = Task(lambda raised: release.wait(10) and None)
    task.start()
    task.abandon()
    task.join()
    assert not task.running
    release.set()


def test_a_child_has_no_threads_and_no_lock_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_parked", list(threads._parked))
    monkeypatch.setattr(threads, "_mlx_is_lost", False)
    monkeypatch.setattr(threads, "_lock", held := threading.Lock())
    threads.require_mlx_threads()
    held.acquire()
    threads._in_child()
    assert threads._parked == [] and not threads._lock.locked()
    with pytest.raises(ForkedProcess, match=rf"process {os.getpid()} was forked .*spawn"):
        threads.require_mlx_threads()


def test_a_child_of_a_process_without_mlx_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_parked", [])
    monkeypatch.setattr(threads, "_mlx_is_lost", False)
    monkeypatch.setattr(threads, "_lock", threading.Lock())
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    threads._in_child()
    threads.require_mlx_threads()
