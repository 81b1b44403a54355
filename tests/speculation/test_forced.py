"""Forced tokens are drafts that are never wrong."""

from __future__ import annotations

from cortexmlx.scheduling.job import JobId
from cortexmlx.speculation.drafter import ForcedDrafter, TokenDraft
from support.scheduling.requests import job_of


def test_it_drafts_the_run_of_each_job_as_far_as_is_asked_for() -> None:
    runs = {0: (7, 8, 9), 1: (), 2: (5,)}
    drafter = ForcedDrafter()
    for number, run in runs.items():
        drafter.add_job(JobId(number), lambda run=run: run)
    jobs = [job_of(number, [1, 2]) for number in runs]
    assert drafter.propose(jobs, 2) == [TokenDraft((7, 8), certain=True), None, TokenDraft((5,), certain=True)]
