"""Recovery: restarts lost workers, and fails or resumes the requests that they ran."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.meter import Measurements
from cortexmlx.core.open_requests import OpenRequests
from cortexmlx.core.served_model import Call, EngineModel
from cortexmlx.errors import CortexError, HostLost
from cortexmlx.scheduling.scheduler import Scheduler

log = logging.getLogger("cortexmlx")

LOSSES = 3
"""How often in a row, without an answer in between, workers may be lost and running requests begin again. A request
that ends its worker would do so for ever.
"""


class Recoverable(Protocol):
    """What a recovery needs of an engine's core."""

    config: EngineConfig
    scheduler: Scheduler
    requests: OpenRequests
    measurements: Measurements
    model: EngineModel

    def drop_in_flight(self) -> None:
        """Drop the steps that are in flight in the lost workers. The rows must have been restarted."""

    def begin_on_new_workers(self) -> None:
        """Begin on new workers with an empty arena. If memory is refused, the next step makes it. Raises HostLost."""

    def fail_all(self, error: CortexError) -> None:
        """Fail every request."""


class Recovery:
    """Restarts the workers after HostLost. As a context manager, it does so for what is raised within it: the running
    requests fail, or begin again with `resume_lost`. The waiting ones wait until the workers are back.

    A start takes seconds to minutes. So another thread waits for the workers, and the engine's thread ends requests
    that are late or cancelled, and takes new ones. A model in this process never raises HostLost.
    """

    def __init__(self, core: Recoverable, wake: Callable[[Call], None]) -> None:
        """`wake(call)` has a call carried out between two steps."""
        self._core = core
        self._wake = wake
        self.losses = 0
        """How often the workers were lost."""
        self._consecutive_losses = 0
        self._last_finished_count = 0
        self.open = True
        """Whether there are workers. If not, the next request has them started."""
        self._start_thread: threading.Thread | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, HostLost):
            return False
        self.recover(error)
        return True

    def recover(self, loss: HostLost) -> None:
        """Fail or restart the running requests, and start new workers. If that fails, all requests fail."""
        core, finished = self._core, self._core.measurements.requests_finished
        self._consecutive_losses = 1 if finished != self._last_finished_count else self._consecutive_losses + 1
        self._last_finished_count = finished
        self.losses += 1
        resume = core.config.resume_lost and self._consecutive_losses <= LOSSES
        log.warning("running requests %s: %s", "begin again" if resume else "fail", loss)
        if not resume:
            self._fail_running(loss)
        core.scheduler.restart_rows()
        self._start_workers()

    @property
    def is_starting(self) -> bool:
        """Whether the workers are being started now."""
        return self._start_thread is not None

    def ensure_workers(self) -> bool:
        """Start the workers if there are none. Return whether a step may begin now."""
        if not (self.open or self.is_starting):
            self._start_workers()
        return self.open

    def _start_workers(self) -> None:
        """Drop what is in flight, and start the workers on another thread."""
        self.open = False
        self._core.drop_in_flight()
        self._start_thread = thread = threading.Thread(
            target=self._restart_workers, name="cortexmlx starts workers", daemon=True
        )
        try:
            thread.start()
        except Exception as error:  # the system has no thread, or no memory for one
            self.finish_start(thread, error)

    def _restart_workers(self) -> None:
        """Start the workers and wait for them. A thread of its own runs this."""
        this_thread, start_error = threading.current_thread(), None
        try:
            self._core.model.restart_workers()
        except BaseException as error:
            start_error = error
        self._wake(lambda core: core.recovery.finish_start(this_thread, start_error))

    def finish_start(self, thread: threading.Thread, start_error: BaseException | None) -> None:
        """Continue once `thread` started the workers or failed with `start_error`. A no-op if the engine was reset."""
        if thread is not self._start_thread:
            return
        self._start_thread = None
        try:
            if start_error is not None:
                raise start_error
            self._core.begin_on_new_workers()
            self.open = True
        except Exception as error:
            log.error("the workers cannot be started again: %s", error)
            failure = error if isinstance(error, CortexError) else HostLost(f"the workers cannot be started: {error!r}")
            self._core.fail_all(failure)

    def _fail_running(self, loss: HostLost) -> None:
        """Fail the requests whose jobs are running."""
        answers = self._core.requests.answers
        for job in [job for job in self._core.scheduler.jobs if job.is_running]:
            if job.id in answers:  # it may have failed with another answer of its request
                self._core.requests.fail(answers[job.id].of_request, loss)
