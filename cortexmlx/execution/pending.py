"""Pending: a step in flight, and how its results come to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from cortexmlx.execution.boundary import StepResult, TokenScores
from cortexmlx.execution.sampling import Sampled


@dataclass(frozen=True)
class Pending:
    """A step in flight: its lazy results, and `scores`, which computes the log-probabilities of its plan's
    `scoring`.
    """

    sampled: Sampled | None
    started: float
    scores: Callable[[], TokenScores] | None = None


def read(pending: Pending) -> StepResult:
    """Wait for the results of a step, and return them on the host."""
    sampled = pending.sampled
    scores = None if pending.scores is None else pending.scores()
    if sampled is None:
        return StepResult(time.perf_counter() - pending.started, scores=scores)
    mx.eval(sampled.arrays())
    return StepResult(
        time.perf_counter() - pending.started,
        _host(sampled.tokens),
        None if sampled.logprobs is None else _host(sampled.logprobs),
        None if sampled.top_ids is None else _host(sampled.top_ids),
        None if sampled.top_logprobs is None else _host(sampled.top_logprobs),
        scores,
        sampled.failures,
    )


def _host(array: mx.array) -> Any:
    return array.tolist()
