"""Requests as they reach the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.request import QueuedRequest, SamplingParams
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.scheduling.scheduler import Scheduler


def add(
    scheduler: Scheduler,
    number: int,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    *,
    fork_of: Job | None = None,
    client: str | None = None,
    background: bool = False,
) -> Job:
    """Queue a job."""
    request = QueuedRequest(tuple(prompt), params, seed, client=client, background=background)
    return scheduler.add(JobId(number), request, stop_ids, fork_of)
