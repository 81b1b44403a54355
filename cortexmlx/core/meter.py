"""Measurements of an engine: latencies, times, counters, and how full it was over time. Pure Python, cheap."""

from __future__ import annotations

import time
from collections import Counter, deque
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
        self._recent_seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._count += 1
        self._recent_seconds.append(seconds)

    def summary(self) -> Latency:
        """Return the statistics so far, with zeros if there are no durations."""
        sorted_seconds = sorted(self._recent_seconds)
        if not sorted_seconds:
            return Latency(0, 0.0, 0.0, 0.0, 0.0)
        last = len(sorted_seconds) - 1
        return Latency(
            count=self._count,
            mean=sum(sorted_seconds) / len(sorted_seconds),
            p50=sorted_seconds[last // 2],
            p99=sorted_seconds[round(last * 0.99)],
            longest=sorted_seconds[last],
        )


class UsageTimeline:
    """Samples of how full the engine was, from its beginning to now: at most `size`, at first `interval` seconds
    apart. When there are `size`, every second one is dropped, and from then on they are taken half as often.
    """

    def __init__(self, size: int = 240, interval: float = 0.25) -> None:
        self._size = size
        self._interval = interval
        self._samples: list[UsageSample] = []

    def is_due(self, seconds: float) -> bool:
        """Return whether the next sample should be taken now."""
        return not self._samples or seconds - self._samples[-1].seconds >= self._interval

    def add(self, sample: UsageSample) -> None:
        """Add a sample that is later than all before. If none is due, it replaces the newest."""
        if not self.is_due(sample.seconds):
            self._samples[-1] = sample
            return
        self._samples.append(sample)
        if len(self._samples) >= self._size:
            self._samples = self._samples[::2]
            self._interval *= 2

    def samples(self) -> tuple[UsageSample, ...]:
        """Return all samples, the oldest first."""
        return tuple(self._samples)


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
    """Counters, times and latencies of an engine since its `start_time` on the performance counter."""

    def __init__(self) -> None:
        self.requests_finished = self.prefilled_tokens = self.generated_tokens = 0
        self.recomputed_tokens: Counter[str] = Counter()
        """Prompt tokens that were computed again though they were known, by reason."""
        self.drafted_tokens = self.accepted_tokens = self.verified_rows = 0
        self.busy_timer, self.plan_timer, self.mask_timer, self.commit_timer = (Stopwatch() for _ in range(4))
        self.queue_time, self.first_token, self.inter_token = LatencyMeter(), LatencyMeter(), LatencyMeter()
        self.start_time = time.perf_counter()
        self.timeline = UsageTimeline()

    def count_drafts(self, verified_rows: Sequence[RowTokens]) -> None:
        """Count the drafted and the accepted tokens of the rows that a step has verified."""
        self.verified_rows += len(verified_rows)
        self.drafted_tokens += sum(each.num_drafted for each in verified_rows)
        self.accepted_tokens += sum(each.num_accepted for each in verified_rows)

    def count_token(
        self, now: float, previous_time: float | None, start_time: float | None, submit_time: float
    ) -> None:
        """Count a token that came at `now`, and its latency. `previous_time` is when the previous one came (None: this
        is the first). Its request was submitted at `submit_time`, and began to be computed at `start_time`. All times
        are on the performance counter.
        """
        self.generated_tokens += 1
        if previous_time is not None:
            self.inter_token.add(now - previous_time)
            return
        self.queue_time.add((start_time or now) - submit_time)
        self.first_token.add(now - submit_time)
