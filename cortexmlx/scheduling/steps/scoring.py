"""Which log-probabilities of prompts a step computes. No mlx."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cortexmlx.scheduling.steps.placement import ScheduledTokens
from cortexmlx.scheduling.steps.plan import Scoring, Segment


def scoring_of(scheduled: ScheduledTokens, segments: Sequence[Segment]) -> Scoring | None:
    """What the `segments` of a step, those of `scheduled`, have `scored`; None if that is nothing."""
    rows, tokens, top, flat = [], [], 0, 0
    for (job, count), segment in zip(scheduled, segments, strict=True):
        where = segment.scored
        if where:
            rows.append(np.arange(where.start, where.stop, dtype=np.int32) - 1 - segment.first + flat)
            tokens.append(np.array(job.request.scored[where.start : where.stop], np.int32))
            top = max(top, job.params.prompt_logprobs or 0)
        flat += count
    return Scoring(np.concatenate(rows), np.concatenate(tokens), top) if rows else None
