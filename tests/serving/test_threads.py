"""Threads that own mlx: they are kept, whatever a task does."""

from __future__ import annotations

import threading

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
