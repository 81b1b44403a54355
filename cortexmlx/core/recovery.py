"""Recovery: what happens to requests when a worker is lost, and how the workers begin again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.meter import Measurements
from cortexmlx.core.open_requests import OpenRequests
from cortexmlx.core.served_model import Call, ServedModel
from cortexmlx.errors import CortexError, HostLost
from cortexmlx.scheduling.scheduler import Scheduler

log = logging.getLogger("cortexmlx")

LOSSES = 3
"""How often in a row, without an answer in between, workers may be lost and running requests begin again. A request
that ends its worker would do so for ever.
"""


class Recoverable(Protocol):
    """The parts of an engine's core that a recovery changes."""

    config: EngineConfig
    scheduler: Scheduler
    requests: OpenRequests
    measured: Measurements
    model: ServedModel

    def let_go(self) -> None:
        """Drop what is in flight in the lost workers. The rows must have been restarted."""

    def reopen(self) -> None:
        """Begin with the new workers, and an empty arena. If they are refused its memory, the next step has it made.
        Raises HostLost.
        """

    def fail_all(self, error: CortexError) -> None:
        """End every request with an error."""


class Recovery:
    """Continues after HostLost. As a context manager, it does so for what is raised within it: the running requests
    fail, or begin again with `resume_lost`. The waiting ones wait until the workers are back.

    A start takes seconds to minutes. So another thread waits for the workers, and the engine's thread ends requests
    that are late or cancelled, and takes new ones. A model in this process never raises HostLost.
    """

    def __init__(self, core: Recoverable, wake: Callable[[Call], None]) -> None:
        """`wake(call)` has a call carried out between two steps."""
        self._core = core
        self._wake = wake
        self.losses = 0
        """How often the workers were lost."""
        self._in_a_row = 0
        self._finished = 0
        self.open = True
        """Whether there are workers. If not, the next request has them started."""
        self._starting: threading.Thread | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, HostLost):
            return False
        self.recover(error)
        return True

    def recover(self, lost: HostLost) -> None:
        """Fail or restart the requests that run, and have the workers started. If that fails, all requests fail."""
        core, finished = self._core, self._core.measured.requests_finished
        self._in_a_row = 1 if finished != self._finished else self._in_a_row + 1
        self._finished = finished
        self.losses += 1
        resume = core.config.resume_lost and self._in_a_row <= LOSSES
        log.warning("running requests %s: %s", "begin again" if resume else "fail", lost)
        if not resume:
            self._fail_running(lost)
        core.scheduler.restart_rows()
        self._start()

    @property
    def starting(self) -> bool:
        """Whether the workers are being started."""
        return self._starting is not None

    def ready(self) -> bool:
        """Return whether a step may begin. If there are no workers, have them started."""
        if not (self.open or self.starting):
            self._start()
        return self.open

    def _start(self) -> None:
        self.open = False
        self._core.let_go()
        self._starting = thread = threading.Thread(target=self._reopen, name="cortexmlx starts workers", daemon=True)
        try:
            thread.start()
        except Exception as error:  # the system has no thread, or no memory for one
            self.end_start(thread, error)

    def _reopen(self) -> None:
        """Start the workers: on the thread that waits for them."""
        me, raised = threading.current_thread(), None
        try:
            self._core.model.reopen()
        except BaseException as error:
            raised = error
        self._wake(lambda core: core.recovery.end_start(me, raised))

    def end_start(self, thread: threading.Thread, raised: BaseException | None) -> None:
        """Go on after the start of a `thread`, which has `raised` something. Does nothing if the engine has begun anew
        since.
        """
        if thread is not self._starting:
            return
        self._starting = None
        try:
            if raised is not None:
                raise raised
            self._core.reopen()
            self.open = True
        except Exception as error:
            log.error("the workers cannot be started again: %s", error)
            lost = error if isinstance(error, CortexError) else HostLost(f"the workers cannot be started: {error!r}")
            self._core.fail_all(lost)

    def _fail_running(self, lost: HostLost) -> None:
        answers = self._core.requests.answers
        for job in [job for job in self._core.scheduler.jobs if job.running]:
            if job.id in answers:  # it may have failed with another answer of its request
                self._core.requests.fail(answers[job.id].of_request, lost)
