"""Tally: how many requests a server has answered and how long they took. Only counts; no text, no key, no address."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cortexmlx.server.web.logged import Logged
from cortexmlx.types.request import Completion, FinishReason

OTHER = "other"
"""The path of requests for which there is none, and the name of a model when there are too many."""

MOST_MODELS = 100
"""Names of models that are counted apart. A label that grows without end would fill the memory of whoever scrapes."""

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_EACH_TOKEN = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Ended(Protocol):
    """The answers of a request that has ended."""

    completions: dict[int, Completion]
    """By the numbers of their prompts."""
    failed: int
    """How many prompts ended with an error."""

    @property
    def cancelled(self) -> int:
        """How many prompts have neither."""


class Histogram:
    """Durations in seconds, counted by upper `bounds`, which are in order."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """How many durations are at most each bound and above the one before; the last count is for those above all."""
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def copy(self) -> Histogram:
        """Return the same, which stays as it is."""
        copied = Histogram(self.bounds)
        copied.counts, copied.sum = list(self.counts), self.sum
        return copied


@dataclass
class Answered:
    """The requests of one model that have ended."""

    reasons: Counter[str] = field(default_factory=Counter)
    """Answers by finish reason."""
    queued: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))
    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))
    """From the submission."""
    each_token: Histogram = field(default_factory=lambda: Histogram(_EACH_TOKEN))
    """The mean time between an answer's tokens after the first one."""
    whole: Histogram = field(default_factory=lambda: Histogram(_WHOLE))
    """From the submission to the last token."""

    def add(self, completion: Completion) -> None:
        """Count an answer."""
        self.reasons[completion.finish_reason.value] += 1
        tokens, times = completion.usage.completion_tokens, completion.timings
        if tokens:
            self.queued.add(times.queued)
            self.first_token.add(times.ttft)
            self.whole.add(times.total)
        if tokens > 1:
            self.each_token.add((times.total - times.ttft) / (tokens - 1))

    def copy(self) -> Answered:
        """Return the same, which stays as it is."""
        histograms = (each.copy() for each in (self.queued, self.first_token, self.each_token, self.whole))
        return Answered(self.reasons.copy(), *histograms)


class Tally:
    """Counts from any thread. `paths` are those that are counted by name."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._lock = threading.Lock()
        self._replies: Counter[tuple[str, int]] = Counter()
        self._models: dict[str, Answered] = {}

    def replied(self, logged: Logged, path: str) -> None:
        """Count a reply, or a client that went away (499). `path` is that of the request, without what the server is
        mounted under.
        """
        known = next((each for each in (path, path.rpartition("/")[0]) if each in self._paths), OTHER)
        with self._lock:
            self._replies[known, logged.status] += 1

    def answered(self, model: str, ended: Ended) -> None:
        """Count the answers of a request to a model."""
        with self._lock:
            if model not in self._models and len(self._models) >= MOST_MODELS:
                model = OTHER
            counted = self._models.setdefault(model, Answered())
            for first in ended.completions.values():
                for completion in (first, *first.others):
                    counted.add(completion)
            counted.reasons[FinishReason.ERROR.value] += ended.failed
            counted.reasons[FinishReason.CANCELLED.value] += ended.cancelled

    def taken(self) -> tuple[Counter[tuple[str, int]], dict[str, Answered]]:
        """Return the replies by path and status, and the answers by model, of this moment."""
        with self._lock:
            return self._replies.copy(), {name: each.copy() for name, each in self._models.items()}
