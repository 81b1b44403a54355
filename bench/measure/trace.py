"""What happened to each request of a run, token by token, and the figures that follow from it.

Whoever ran the requests (cortexmlx or a peer), the figures are computed here, from the same kind of stamps by the same
formulas. Every stamp has two clocks: wall time, and the CPU time of the whole process, which other programs on the
machine disturb much less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cortexmlx.errors import CortexError, InvalidRequest


@dataclass(frozen=True)
class Work:
    """One request to run: token ids in, exactly `max_tokens` greedy tokens out (an end token does not end it).

    `after` n > 0: it arrives only when the run's first request has n tokens. `at` > 0: so many seconds after the
    run's start, whoever is served then.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    after: int = 0
    at: float = 0.0


@dataclass(frozen=True, order=True)
class Stamp:
    """A moment: seconds of wall time and seconds of CPU time that the process has used, all threads."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Stamp:
        """This moment."""
        return cls(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class Figure:
    """One measured number by both clocks; `cpu` is None where CPU time says nothing about it."""

    wall: float
    cpu: float | None = None


@dataclass(frozen=True)
class RequestTrace:
    """One request: its prompt's length, when it was submitted, its tokens and when each came out."""

    prompt_tokens: int
    submitted: Stamp
    tokens: tuple[int, ...]
    stamps: tuple[Stamp, ...]

    def rate(self, begin: Stamp, end: Stamp) -> Figure:
        """Tokens per second between the token nearest to `begin` and the one nearest to `end`; 0 if it is the same."""
        first, last = self.span(begin, end)
        return per_second(last - first, self.stamps[first], self.stamps[last]) if first < last else Figure(0.0, 0.0)

    def span(self, begin: Stamp, end: Stamp) -> tuple[int, int]:
        """Which of its tokens are nearest to two moments."""
        return self._nearest(begin), self._nearest(end)

    def _nearest(self, moment: Stamp) -> int:
        return min(range(len(self.stamps)), key=lambda i: abs(self.stamps[i].wall - moment.wall))


@dataclass(frozen=True)
class Trace:
    """A run: when it started, and its requests in the order of the work. `kv_bytes` is the most KV memory in use at
    the moments when a token came out (0: nobody looked)."""

    started: Stamp
    requests: tuple[RequestTrace, ...]
    kv_bytes: int = 0

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The generated token ids of every request."""
        return tuple(r.tokens for r in self.requests)

    @property
    def prefilled(self) -> Stamp:
        """When the last of the requests had its first token."""
        return max(r.stamps[0] for r in self.requests)

    def prefill_rate(self) -> Figure:
        """Prompt tokens per second from the start until every request has its first token."""
        return per_second(sum(r.prompt_tokens for r in self.requests), self.started, self.prefilled)

    def decode_rate(self) -> Figure:
        """Tokens per second while all requests are decoding: after the last first token, up to the first last one.

        A side that hands out the tokens of a step one after the other would lose most of the step that ends the time.
        So each request is measured between those of its own tokens that are nearest to its beginning and its end.
        """
        begin, end = self.prefilled, min(r.stamps[-1] for r in self.requests)
        if end.wall <= begin.wall:
            raise InvalidRequest("the requests never decode all at once: let them generate more tokens (-n)")
        rates = [r.rate(begin, end) for r in self.requests]
        cpu = [rate.cpu for rate in rates if rate.cpu is not None]
        return Figure(sum(rate.wall for rate in rates), sum(cpu) if len(cpu) == len(rates) else None)

    @property
    def decoded(self) -> int:
        """The tokens that `decode_rate` counts."""
        begin, end = self.prefilled, min(r.stamps[-1] for r in self.requests)
        spans = [r.span(begin, end) for r in self.requests]
        return sum(last - first for first, last in spans)

    def total(self) -> Figure:
        """Seconds from the start to the last token of all."""
        end = max(r.stamps[-1] for r in self.requests)
        return Figure(end.wall - self.started.wall, end.cpu - self.started.cpu)

    def ttft(self, request: int) -> Figure:
        """Seconds from a request's submission to its first token."""
        r = self.requests[request]
        return Figure(r.stamps[0].wall - r.submitted.wall, r.stamps[0].cpu - r.submitted.cpu)

    def longest_gap(self, requests: Sequence[int]) -> Figure:
        """The longest wait in seconds between two tokens of one of these requests."""
        gaps = (b.wall - a.wall for i in requests for a, b in pairwise(self.requests[i].stamps))
        return Figure(max(gaps))

    def kv_peak(self) -> Figure:
        """The most KV memory in use, in bytes."""
        return Figure(float(self.kv_bytes))


class Recorder:
    """Collects a trace while it happens."""

    def __init__(self, work: Sequence[Work]) -> None:
        self.started = Stamp.now()
        self.kv_bytes = 0
        self._work = work
        self._submitted = [self.started] * len(work)
        self._tokens: list[list[int]] = [[] for _ in work]
        self._stamps: list[list[Stamp]] = [[] for _ in work]

    def submitted(self, request: int) -> None:
        """A request is about to be handed over. One that arrives `at` a time waits from then on, also if whoever hands
        it over was busy: otherwise a side that does not listen would seem to answer fast.
        """
        now, due = Stamp.now(), self._work[request].at
        self._submitted[request] = Stamp(self.started.wall + due, now.cpu) if due else now

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started.wall

    def token(self, request: int, token: int, stamp: Stamp) -> int:
        """A request has one more token; returns how many it has."""
        self._tokens[request].append(token)
        self._stamps[request].append(stamp)
        return len(self._tokens[request])

    def trace(self) -> Trace:
        """The run, at its end. Raises CortexError if a request has not just the tokens that were asked for: a figure
        counts tokens that were there.
        """
        for work, tokens in zip(self._work, self._tokens, strict=True):
            if len(tokens) != work.max_tokens:
                raise CortexError(
                    f"a request of the benchmark has {len(tokens)} of {work.max_tokens} tokens: no figure"
                )
        columns = zip(self._work, self._submitted, self._tokens, self._stamps, strict=True)
        requests = tuple(RequestTrace(len(w.prompt), s, tuple(t), tuple(m)) for w, s, t, m in columns)
        return Trace(self.started, requests, self.kv_bytes)


def per_second(tokens: int, begin: Stamp, end: Stamp) -> Figure:
    """Tokens per second between two moments, by either clock."""
    wall, cpu = end.wall - begin.wall, end.cpu - begin.cpu
    return Figure(tokens / wall, tokens / cpu if cpu > 0 else None)
