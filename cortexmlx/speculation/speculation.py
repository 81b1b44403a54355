"""Speculation: drafts tokens for rows before a step is planned, and counts how many were right. Without mlx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cortexmlx.scheduling.drafts import MOST_DRAFTS
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.scheduling.steps.plan import StepPlan
from cortexmlx.speculation.drafter import Drafter


@dataclass
class DraftCounts:
    """How many tokens a drafter has drafted, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0


class Speculation:
    """Asks the `drafters`, in order, for the next tokens of a scheduler's rows; the first that has a guess drafts."""

    def __init__(self, scheduler: Scheduler, drafters: Sequence[Drafter]) -> None:
        self.counts: Mapping[str, DraftCounts] = {drafter.name: DraftCounts() for drafter in drafters}
        self._scheduler = scheduler
        self._drafters = drafters
        self._drafted_by: dict[JobId, Drafter] = {}

    @property
    def wants_drained(self) -> bool:
        """Whether nothing may be in flight when `draft` is called, because a drafter must know all tokens of rows."""
        return any(drafter.wants_drained for drafter in self._drafters) and bool(self._scheduler.draftable)

    def draft(self) -> None:
        """Draft tokens of rows, if that is worth it. Call it before a step is planned."""
        if not self._drafters:
            return
        jobs = [job for job in self._scheduler.draftable if not job.drafts]
        for drafter in self._drafters:
            if not jobs:
                return
            left = []
            for job, draft in zip(jobs, drafter.propose(jobs, MOST_DRAFTS), strict=True):
                if draft is None or not draft.tokens:
                    left.append(job)
                    continue
                self._scheduler.draft(job.id, draft.tokens)
                self._drafted_by[job.id] = drafter
            jobs = left

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step whose results were taken. `seconds` is the time that it took of the engine's: since the
        step before was taken, or since it was begun if there was none.
        """
        while self._scheduler.verified:
            verified = self._scheduler.verified.pop()
            if (drafter := self._drafted_by.pop(verified.job.id, None)) is not None:
                counts = self.counts[drafter.name]
                counts.drafted += verified.drafted
                counts.accepted += verified.accepted

    def end(self, job: Job) -> None:
        """Note that a job has ended."""
        self._drafted_by.pop(job.id, None)
        for drafter in self._drafters:
            drafter.end(job)

    def forget(self) -> None:
        """Forget all texts, because the engine begins anew."""
        self._drafted_by.clear()
        for drafter in self._drafters:
            drafter.forget()
