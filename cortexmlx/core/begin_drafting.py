"""Who drafts tokens for the rows of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cortexmlx.core.config import EngineConfig
from cortexmlx.core.draft_model import DraftModel
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.speculation.drafter import Drafter, ForcedDrafter
from cortexmlx.speculation.speculation import Speculation
from cortexmlx.speculation.suffix import SuffixDrafter


def begin_speculation(
    config: EngineConfig, scheduler: Scheduler, forced: Callable[[Job], Sequence[int]], draft: DraftModel | None
) -> Speculation:
    """Return who drafts tokens for the rows of `scheduler`. `forced(job)` returns the tokens that a grammar forces.

    Verified tokens are computed in other ways than decoded ones, and how many there are depends on the time that steps
    take, so a `reproducible` engine drafts none.
    """
    if config.reproducible:
        return Speculation(scheduler, ())
    drafters: list[Drafter] = []
    if config.forced_tokens:
        drafters.append(ForcedDrafter(forced))
    if config.speculate:
        drafters.append(SuffixDrafter(config.prefix_cache))
    return Speculation(scheduler, drafters, () if draft is None else (draft,))
