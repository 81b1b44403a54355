"""WarmUp: compiles and checks attention kernels on threads of their own, while the engine's thread loads the model."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from cortexmlx.attention.selfcheck import KernelCheck
from cortexmlx.core.threads import Task
from cortexmlx.types.progress import OnProgress, Progress

log = logging.getLogger("cortexmlx")

THREADS = 2
"""How many kernels are worked on at a time.

MLX's Metal device keeps compiled kernels in two maps for all threads. It builds a library, from the text, while it
holds `library_mtx_` (`Device::get_library`), and then a pipeline while it holds `kernel_mtx_` (`Device::get_kernel_`).
So two kernels can be in work at a time, one in each, and a third thread would wait. Every launch takes `kernel_mtx_`
shared: the thread that loads waits while a pipeline is made, but not for a library.
"""

_LOOK_SECONDS = 0.1
"""How often the waiting thread reports, so that it notices when the engine is closed."""


class WarmUp:
    """Carries out `checks`, from the first on. Each runs on one thread from its arrays to its result, because a lazy
    array can only be evaluated on the thread that made it. A check that raises is made again at the kernel's first use.
    """

    def __init__(self, checks: Sequence[KernelCheck] = ()) -> None:
        self._left: deque[KernelCheck] = deque()
        self._total = 0
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tasks: list[Task] = []
        self.add(checks)

    def add(self, checks: Sequence[KernelCheck]) -> None:
        """Carry out more checks. Threads that are at work may be about to end, so these get their own."""
        self._left.extend(checks)
        self._total += len(checks)
        for _ in range(min(THREADS, len(checks))):
            task = Task(self._run)
            try:
                task.start()
            except RuntimeError as error:  # the system starts no more threads
                log.warning("attention kernels are compiled at their first use: %s", error)
                return
            self._tasks.append(task)

    def finish(self, report: OnProgress) -> None:
        """Wait until all checks have ended, and report how many have. Raises what `report` raises."""
        done = 0
        while done < self._total and any(task.running for task in self._tasks):
            report(Progress("compiling", done, self._total))
            with suppress(queue.Empty):
                self._ended.get(timeout=_LOOK_SECONDS)
                done += 1
        if self._total:
            report(Progress("compiling", self._total, self._total))

    def stop(self) -> None:
        """Begin no further check. Those that have begun end on their threads: nobody can interrupt a compiler."""
        self._left.clear()

    def _run(self, raised: BaseException | None) -> None:
        """Carry out checks until none is left. `raised` is what an earlier call of this task raised."""
        if raised is not None:
            log.warning("a thread that compiles attention kernels was interrupted by %r", raised)
        while self._left:
            try:
                check = self._left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                check.run()
            except Exception:
                log.exception("attention (%s) could not be checked, and is checked at its first use", check.label)
            finally:
                self._ended.put(None)
