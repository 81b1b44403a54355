"""SuffixDrafter: guesses that a text goes on as it did after the same words before. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence

from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.speculation.drafter import Draft

ORDER = 3
"""How many tokens must be the same."""


class SuffixDrafter:
    """Drafts what followed the newest earlier place in a row's own text that ends with the same tokens."""

    name = "suffix"
    wants_drained = False

    def __init__(self) -> None:
        self._places: dict[JobId, dict[tuple[int, ...], int]] = {}
        self._read: dict[JobId, int] = {}

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[Draft | None]:
        """See `Drafter`."""
        return [self._draft(job, budget) for job in jobs]

    def _draft(self, job: Job, budget: int) -> Draft | None:
        tokens = job.tokens
        places = self._places.setdefault(job.id, {})
        for end in range(max(self._read.get(job.id, 0), ORDER), len(tokens)):
            places[tuple(tokens[end - ORDER : end])] = end
        self._read[job.id] = len(tokens)
        place = places.get(tuple(tokens[-ORDER:]))
        return None if place is None else Draft(tokens[place : place + budget])

    def end(self, job: Job) -> None:
        """See `Drafter`."""
        self._places.pop(job.id, None)
        self._read.pop(job.id, None)

    def forget(self) -> None:
        """See `Drafter`."""
        self._places.clear()
        self._read.clear()
