"""Requests as they reach the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cortexmlx.scheduling.job import Job, JobId, RowTokens
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.types.embeddings import PoolingSpec
from cortexmlx.types.request import QueuedRequest
from cortexmlx.types.sampling_params import SamplingParams


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


def commit(
    scheduler: Scheduler, plan: StepPlan, tokens: Sequence[int], seconds: float | None = None
) -> list[RowTokens]:
    """Hand the tokens of a step to a scheduler, and end the jobs that end with them, as the engine does."""
    rows = scheduler.commit(plan, tokens, seconds)
    for row in rows:
        if row.finish_reason is not None:
            scheduler.finish(row.job.id, row.finish_reason)
    return rows


def job_of(
    number: int,
    prompt: Sequence[int],
    max_tokens: int = 40,
    keep: KeepPolicy | None = None,
    client: str | None = None,
    salt: str | None = None,
    cache: bool = True,
    fork_of: Job | None = None,
    **params: Any,
) -> Job:
    """A job that no scheduler knows."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    request = QueuedRequest(tuple(prompt), sampling, client=client, cache=cache)
    arrival = float(number)
    return Job(
        JobId(number),
        request,
        frozenset(),
        max_tokens,
        arrival,
        number=number,
        keys=[],
        fork_of=fork_of,
        keep=keep,
        salt=salt,
    )


def text_of(
    prompt: list[int], first: int | None = None, shared: int = 0, client: str | None = None, **asked: Any
) -> QueuedRequest:
    """A request for the states of a text: of its last token, unless `first` says from which on."""
    pooled = PoolingSpec(len(prompt) - 1 if first is None else first, shared=shared, **asked)
    params = SamplingParams(max_tokens=1)
    return QueuedRequest(tuple(prompt), params, client=client, background=True, cache=shared > 0, pooling=pooled)
