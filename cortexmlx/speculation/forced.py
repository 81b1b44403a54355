"""ForcedDrafter: the tokens that a grammar forces, which are never wrong. Without mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cortexmlx.scheduling.job import Job
from cortexmlx.speculation.drafter import Draft


class ForcedDrafter:
    """Drafts what must come next. `forced(job)` returns these tokens; often there are none."""

    name = "forced"

    def __init__(self, forced: Callable[[Job], Sequence[int]]) -> None:
        self._forced = forced

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[Draft | None]:
        """See `Drafter`."""
        runs = [self._forced(job)[:budget] for job in jobs]
        return [Draft(run, certain=True) if run else None for run in runs]

    def end(self, job: Job) -> None:
        """See `Drafter`."""

    def forget(self) -> None:
        """See `Drafter`."""
