"""Latencies of the recent past, summed up: pure Python, cheap to add to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_REMEMBERED = 1024
"""How many of the newest values the quantiles are taken over."""


@dataclass(frozen=True)
class Latency:
    """A number of durations in seconds: how many in all, and the mean, median, 99th percentile and longest of the
    newest.
    """

    count: int
    mean: float
    p50: float
    p99: float
    longest: float


class Meter:
    """Collects durations in seconds."""

    def __init__(self) -> None:
        self._count = 0
        self._newest: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        """One more duration."""
        self._count += 1
        self._newest.append(seconds)

    def summary(self) -> Latency:
        """Everything so far; zeros if there is nothing."""
        ordered = sorted(self._newest)
        if not ordered:
            return Latency(0, 0.0, 0.0, 0.0, 0.0)
        last = len(ordered) - 1
        return Latency(
            count=self._count,
            mean=sum(ordered) / len(ordered),
            p50=ordered[last // 2],
            p99=ordered[round(last * 0.99)],
            longest=ordered[last],
        )
