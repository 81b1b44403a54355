"""When the system refuses memory that the cache was promised: what becomes of the jobs that counted on it. No mlx."""

from __future__ import annotations

from collections.abc import Iterable

from cortexmlx.scheduling.job import Job


def fit(job: Job, capacity: int) -> None:
    """Let a job's answer end where a cache of `capacity` tokens is full; its last token needs no place there."""
    job.max_new_tokens = max(job.generated, min(job.max_new_tokens, capacity + 1 - job.prompt_length))


def fit_all(jobs: Iterable[Job], capacity: int) -> list[Job]:
    """`fit` for all. Returns those that can get no token more: their answer has reached its end, or their prompt
    alone is too long.
    """
    ended = []
    for job in jobs:
        fit(job, capacity)
        if job.generated >= job.max_new_tokens:
            ended.append(job)
    return ended
