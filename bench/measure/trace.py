"""What happened to each request of a run, token by token, and the figures that follow from it.

The figures of cortexmlx and of a peer are computed here, by the same formulas from the same kind of stamps. Every stamp
has two clocks: wall time, and the CPU time of the whole process, which other programs on the machine disturb much less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cortexmlx.errors import CortexError, InvalidRequest


@dataclass(frozen=True)
class Work:
    """One request: a prompt of token ids, and exactly `max_tokens` greedy tokens. An end token does not end it."""

    prompt: tuple[int, ...]
    max_tokens: int
    after: int = 0
    """If above 0: the request arrives only when the run's first request has this many tokens."""
    at: float = 0.0
    """If above 0: the request arrives this many seconds after the run's start, whatever runs then."""


@dataclass(frozen=True, order=True)
class Stamp:
    """A moment: seconds of wall time, and seconds of CPU time that all threads of the process have used."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Stamp:
        """Return this moment."""
        return cls(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class Figure:
    """One measured number by both clocks; `cpu` is None where CPU time means nothing."""

    wall: float
    cpu: float | None = None


@dataclass(frozen=True)
class RequestTrace:
    """One request: the length of its prompt, when it was submitted, its tokens, and when each came out."""

    prompt_tokens: int
    submitted: Stamp
    tokens: tuple[int, ...]
    stamps: tuple[Stamp, ...]

    def rate(self, begin: Stamp, end: Stamp) -> Figure:
        """Return tokens per second from the token nearest to `begin` to the token nearest to `end`; 0 if they are the
        same token.
        """
        first, last = self.span(begin, end)
        return per_second(last - first, self.stamps[first], self.stamps[last]) if first < last else Figure(0.0, 0.0)

    def span(self, begin: Stamp, end: Stamp) -> tuple[int, int]:
        """Return the indices of the tokens nearest to two moments."""
        return self._nearest(begin), self._nearest(end)

    def _nearest(self, moment: Stamp) -> int:
        return min(range(len(self.stamps)), key=lambda i: abs(self.stamps[i].wall - moment.wall))


@dataclass(frozen=True)
class Trace:
    """A run: when it started, and its requests in the order of the work."""

    started: Stamp
    requests: tuple[RequestTrace, ...]
    kv_bytes: int = 0
    """The most KV memory in use, in bytes, at the moments when a token came out; 0 if it was not watched."""

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The generated token ids of every request."""
        return tuple(r.tokens for r in self.requests)

    @property
    def prefilled(self) -> Stamp:
        """The moment when every request has its first token."""
        return max(r.stamps[0] for r in self.requests)

    def prefill_rate(self) -> Figure:
        """Return prompt tokens per second, from the start until every request has its first token."""
        return per_second(sum(r.prompt_tokens for r in self.requests), self.started, self.prefilled)

    def decode_rate(self) -> Figure:
        """Return tokens per second while all requests decode. That is after every request has its first token, and
        until a request has its last.

        The rates of the requests are added. Each request is measured between its own tokens nearest to both ends. With
        the same two moments for all, a side that hands out a step's tokens one by one would lose most of the last step.

        Raises InvalidRequest if the requests never decode all at once.
        """
        begin, end = self.prefilled, min(r.stamps[-1] for r in self.requests)
        if end.wall <= begin.wall:
            raise InvalidRequest("the requests never decode all at once: let them generate more tokens (-n)")
        rates = [r.rate(begin, end) for r in self.requests]
        cpu = [rate.cpu for rate in rates if rate.cpu is not None]
        return Figure(sum(rate.wall for rate in rates), sum(cpu) if len(cpu) == len(rates) else None)

    @property
    def decoded(self) -> int:
        """The number of tokens that `decode_rate` counts."""
        begin, end = self.prefilled, min(r.stamps[-1] for r in self.requests)
        spans = [r.span(begin, end) for r in self.requests]
        return sum(last - first for first, last in spans)

    def total(self) -> Figure:
        """Return seconds from the start to the last token of all requests."""
        end = max(r.stamps[-1] for r in self.requests)
        return Figure(end.wall - self.started.wall, end.cpu - self.started.cpu)

    def ttft(self, request: int) -> Figure:
        """Return seconds from a request's submission to its first token."""
        r = self.requests[request]
        return Figure(r.stamps[0].wall - r.submitted.wall, r.stamps[0].cpu - r.submitted.cpu)

    def longest_gap(self, requests: Sequence[int]) -> Figure:
        """Return the longest time in seconds between two tokens of one of these requests."""
        gaps = (b.wall - a.wall for i in requests for a, b in pairwise(self.requests[i].stamps))
        return Figure(max(gaps))

    def kv_peak(self) -> Figure:
        """Return the most KV memory in use, in bytes."""
        return Figure(float(self.kv_bytes))


class Recorder:
    """Records a trace during a run."""

    def __init__(self, work: Sequence[Work]) -> None:
        self.started = Stamp.now()
        self.kv_bytes = 0
        self._work = work
        self._submitted = [self.started] * len(work)
        self._tokens: list[list[int]] = [[] for _ in work]
        self._stamps: list[list[Stamp]] = [[] for _ in work]

    def submitted(self, request: int) -> None:
        """Record that a request is about to be submitted.

        A request that arrives `at` a time waits from then on, even if its submitter was busy. Otherwise a side that is
        slow to accept requests would seem to answer fast.
        """
        now, due = Stamp.now(), self._work[request].at
        self._submitted[request] = Stamp(self.started.wall + due, now.cpu) if due else now

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.started.wall

    def token(self, request: int, token: int, stamp: Stamp) -> int:
        """Record a request's next token, and return how many it has."""
        self._tokens[request].append(token)
        self._stamps[request].append(stamp)
        return len(self._tokens[request])

    def trace(self) -> Trace:
        """Return the trace of the run, at its end.

        Raises CortexError if a request has more or fewer tokens than it asked for, because every figure counts tokens.
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
    """Return tokens per second between two moments, by both clocks."""
    wall, cpu = end.wall - begin.wall, end.cpu - begin.cpu
    return Figure(tokens / wall, tokens / cpu if cpu > 0 else None)
