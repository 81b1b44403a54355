"""Recovery: what happens to requests when a worker is lost, and how the workers begin again."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Protocol

from cortexmlx.errors import CortexError, HostLost
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.serving.config import EngineConfig
from cortexmlx.serving.observed.meter import Measurements
from cortexmlx.serving.open_requests import OpenRequests
from cortexmlx.stats import EngineStats

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

    def reopen(self) -> None:
        """Start the workers anew, with an empty arena. The rows must have been restarted. Raises HostLost, HostRefused
        or MemoryRefused.
        """

    def fail_all(self, error: CortexError) -> None:
        """End every request with an error."""

    def stats(self) -> EngineStats:
        """Return the engine's statistics."""


class Recovery:
    """Continues after HostLost. As a context manager, it does so for what is raised within it: the running requests
    fail, or begin again with `resume_lost`. The waiting ones wait until the workers are back.

    A model in this process never raises HostLost.
    """

    def __init__(self, core: Recoverable) -> None:
        self._core = core
        self.losses = 0
        """How often the workers were lost."""
        self._in_a_row = 0
        self._finished = 0
        self.open = True
        """Whether there are workers. If not, the next request has them started."""
        self.stats: EngineStats | None = None
        """While the workers are started anew: the engine's statistics of just before. Any thread may read it."""

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
        """Fail or restart the requests that run, and start the workers anew. If that fails, all requests fail."""
        core, finished = self._core, self._core.measured.requests_finished
        self._in_a_row = 1 if finished != self._finished else self._in_a_row + 1
        self._finished = finished
        self.losses += 1
        resume = core.config.resume_lost and self._in_a_row <= LOSSES
        log.warning("running requests %s: %s", "begin again" if resume else "fail", lost)
        if not resume:
            self._fail_running(lost)
        core.scheduler.restart_rows()
        core.scheduler.forget_loads()  # what was read for them was in the workers
        self.reopened()

    def reopened(self) -> bool:
        """Start the workers anew, and return whether there are any now. If not, all requests fail. Call it before a
        step if the workers are not `open`.
        """
        self.open = False
        self.stats = self._core.stats()
        try:
            self._core.reopen()
            self.open = True
        except (CortexError, OSError) as error:
            log.error("the workers cannot be started again: %s", error)
            lost = error if isinstance(error, CortexError) else HostLost(f"the workers cannot be started: {error}")
            self._core.fail_all(lost)
        finally:
            self.stats = None
        return self.open

    def _fail_running(self, lost: HostLost) -> None:
        answers = self._core.requests.answers
        for job in [job for job in self._core.scheduler.jobs if job.running]:
            if job.id in answers:  # it may have failed with another answer of its request
                self._core.requests.fail(answers[job.id].of_request, lost)
