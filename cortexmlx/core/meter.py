"""Measurements of an engine: latencies, times, counters, and how full it was over time. Pure Python, cheap."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from cortexmlx.scheduling.job import RowTokens
from cortexmlx.stats import Latency, UsageSample

_REMEMBERED = 1024
"""How many of the newest values the quantiles are computed from."""


class LatencyMeter:
    """Collects durations in seconds, and summarizes the newest ones as a `Latency`."""

    def __init__(self) -> None:
        self._count = 0
        self._newest: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._count += 1
        self._newest.append(seconds)

    def summary(self) -> Latency:
        """Return the statistics so far, with zeros if there are no durations."""
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


class UsageTimeline:
    """Samples of how full the engine was, from its beginning to now: at most `size`, at first `interval` seconds
    apart. When there are `size`, every second one is dropped, and from then on they are taken half as often.
    """

    def __init__(self, size: int = 240, interval: float = 0.25) -> None:
        self._size = size
        self._interval = interval
        self._moments: list[UsageSample] = []

    def is_due(self, seconds: float) -> bool:
        """Return whether the next sample should be taken now."""
        return not self._moments or seconds - self._moments[-1].seconds >= self._interval

    def add(self, moment: UsageSample) -> None:
        """Add a sample that is later than all before. If none is due, it replaces the newest."""
        if not self.is_due(moment.seconds):
            self._moments[-1] = moment
            return
        self._moments.append(moment)
        if len(self._moments) >= self._size:
            self._moments = self._moments[::2]
            self._interval *= 2

    def samples(self) -> tuple[UsageSample, ...]:
        """Return all samples, the oldest first."""
        return tuple(self._moments)


class Stopwatch:
    """Sums up the seconds spent in its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._started


class Measurements:
    """Counters, times and latencies of an engine since it `began`, on the performance counter."""

    def __init__(self) -> None:
        self.requests_finished = self.prompt_tokens = self.prefilled_tokens = self.generated_tokens = 0
        self.drafted_tokens = self.accepted_tokens = self.verified = 0
        self.busy, self.planning, self.masking, self.committing = (Stopwatch() for _ in range(4))
        self.queued, self.first_token, self.inter_token = LatencyMeter(), LatencyMeter(), LatencyMeter()
        self.began = time.perf_counter()
        self.timeline = UsageTimeline()

    def count_drafts(self, verified: Sequence[RowTokens]) -> None:
        """Count the drafted and the accepted tokens of the rows that a step has verified."""
        self.verified += len(verified)
        self.drafted_tokens += sum(each.drafted for each in verified)
        self.accepted_tokens += sum(each.accepted for each in verified)

    def count_token(self, now: float, before: float | None, started: float | None, submitted: float) -> None:
        """Count a token that came at `now`, and its latency. `before` is when the previous one came (None: this is the
        first). Its request was `submitted`, and began to be computed at `started`. All times are on the performance
        counter.
        """
        self.generated_tokens += 1
        if before is not None:
            self.inter_token.add(now - before)
            return
        self.queued.add((started or now) - submitted)
        self.first_token.add(now - submitted)
