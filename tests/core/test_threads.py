"""Threads that own mlx: they are kept, whatever a task does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cortexmlx.core import threads
from cortexmlx.core.threads import MlxTask
from cortexmlx.errors import ForkedProcess
from support.models.tiny import write_tiny
from support.patience import PATIENCE, soon


def test_a_task_that_raises_is_begun_again_on_the_same_thread() -> None:
    seen: list[tuple[int, BaseException | None]] = []
    interrupts = [KeyboardInterrupt(), SystemExit(), GeneratorExit()]

    def run(raised: BaseException | None) -> None:
        seen.append((threading.get_ident(), raised))
        if len(seen) <= len(interrupts):
            raise interrupts[len(seen) - 1]

    task = MlxTask(run)
    task.start()
    task.join()
    assert [raised for _, raised in seen] == [None, *interrupts]
    assert len({thread for thread, _ in seen}) == 1 and not task.running


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "cortexmlx-engine"}


def until(holds: Callable[[], bool]) -> None:
    assert soon(holds), "it never comes true"


def test_a_thread_that_has_done_its_work_takes_the_next_task() -> None:
    before, used = engine_threads(), set[threading.Thread]()
    for _ in range(20):
        task = MlxTask(lambda raised: used.add(threading.current_thread()))
        task.start()
        task.join()
        until(lambda: used <= set(threads._parked))
    assert len(engine_threads() - before) <= 1, "a new one only where none is parked"
    assert all(thread.daemon and thread.is_alive() for thread in used)


def test_two_tasks_at_once_have_a_thread_each() -> None:
    met = threading.Barrier(2)
    where: list[int] = []

    def run(raised: BaseException | None) -> None:
        met.wait(PATIENCE)
        where.append(threading.get_ident())

    tasks = [MlxTask(run), MlxTask(run)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert len(set(where)) == 2 and threading.get_ident() not in where


def test_a_task_runs_until_it_returns_and_knows_its_own_thread() -> None:
    begin, here = threading.Event(), list[bool]()
    task = MlxTask(lambda raised: (begin.wait(PATIENCE), here.append(task.is_current_thread()))[1])
    assert not task.running and not task.is_current_thread()
    task.start()
    assert task.running and not task.is_current_thread()
    begin.set()
    task.join()
    task.join()
    assert not task.running and here == [True]


def test_a_task_that_is_abandoned_is_over_for_whoever_waits() -> None:
    """As in a forked child, where its thread is not."""
    release = threading.Event()
    task = MlxTask(lambda raised: release.wait(PATIENCE) and None)
    task.start()
    task.abandon()
    task.join()
    assert not task.running
    release.set()


def test_a_child_has_no_threads_and_no_lock_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_all_threads", list(threads._all_threads))
    monkeypatch.setattr(threads, "_parked", list(threads._parked))
    monkeypatch.setattr(threads, "_mlx_is_lost", False)
    monkeypatch.setattr(threads, "_lock", held := threading.Lock())
    monkeypatch.setitem(sys.modules, "mlx.core", threads)
    threads.require_mlx_threads()
    held.acquire()
    threads._reset_after_fork()
    assert threads._all_threads == threads._parked == [] and not threads._lock.locked()
    with pytest.raises(ForkedProcess, match=rf"process {os.getpid()} was forked .*spawn"):
        threads.require_mlx_threads()


def test_a_child_of_a_process_without_mlx_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_all_threads", [])
    monkeypatch.setattr(threads, "_parked", [])
    monkeypatch.setattr(threads, "_mlx_is_lost", False)
    monkeypatch.setattr(threads, "_lock", threading.Lock())
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    threads._reset_after_fork()
    threads.require_mlx_threads()


AT_ONCE = """
import sys, time
from cortexmlx import Engine, SamplingParams
from cortexmlx.core.threads import MlxTask

whole = MlxTask.carry_out

def late(self, raised):  # on a busy machine, the thread's last instructions come when it gets a core
    whole(self, raised)
    time.sleep(0.005)

MlxTask.carry_out = late
with Engine(sys.argv[1]) as engine, Engine(sys.argv[1]) as other:
    engine.generate([1, 2], SamplingParams(max_tokens=3))
    other.generate([1, 2], SamplingParams(max_tokens=3))
print("done")
"""


def test_a_program_that_ends_behind_its_engine_ends_well(tmp_path: Path) -> None:
    """A thread that has run compiled functions of mlx aborts the process if the end of the interpreter ends it."""
    model = write_tiny(tmp_path)
    done = subprocess.run([sys.executable, "-c", AT_ONCE, str(model)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_the_end_of_a_program_does_not_wait_for_a_thread_that_goes_on(tmp_path: Path) -> None:
    program = (
        "import threading\nfrom cortexmlx.core.threads import MlxTask\n"
        "MlxTask(lambda _: threading.Event().wait()).start()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
