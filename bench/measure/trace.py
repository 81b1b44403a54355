"""The record of a run: what happened to each request, token by token, and the figures that follow from it.

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
class BenchRequest:
    """One benchmark request: a prompt of token ids, and exactly `max_tokens` greedy tokens, even after an end token."""

    prompt: tuple[int, ...]
    max_tokens: int
    after_tokens: int = 0
    """If above 0: the request arrives only when the run's first request has this many tokens."""


@dataclass(frozen=True, order=True)
class Timestamp:
    """A moment: seconds of wall time, and seconds of CPU time that all threads of the process have used."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Timestamp:
        """Return the present moment."""
        return cls(time.perf_counter(), time.process_time())


@dataclass(frozen=True)
class Figure:
    """One measured number, by wall time and by CPU time; `cpu` is None where CPU time means nothing."""

    wall: float
    cpu: float | None = None


@dataclass(frozen=True)
class RequestTrace:
    """The record of one request: its prompt's length, when it was submitted, its tokens, and when each came out."""

    prompt_tokens: int
    submit_time: Timestamp
    tokens: tuple[int, ...]
    stamps: tuple[Timestamp, ...]

    def token_rate(self, begin: Timestamp, end: Timestamp) -> Figure:
        """Return tokens per second from the token nearest to `begin` to the one nearest to `end`; 0 if the same."""
        first, last = self.token_span(begin, end)
        return per_second(last - first, self.stamps[first], self.stamps[last]) if first < last else Figure(0.0, 0.0)

    def token_span(self, begin: Timestamp, end: Timestamp) -> tuple[int, int]:
        """Return the indices of the tokens that came out nearest to two moments."""
        return self._nearest_token(begin), self._nearest_token(end)

    def _nearest_token(self, moment: Timestamp) -> int:
        """Return the index of the token that came out nearest to a moment."""
        return min(range(len(self.stamps)), key=lambda i: abs(self.stamps[i].wall - moment.wall))


@dataclass(frozen=True)
class RunTrace:
    """The record of a run: when it started, and its requests in the order in which they were given."""

    started: Timestamp
    requests: tuple[RequestTrace, ...]
    kv_bytes: int = 0
    """The most KV memory in use, in bytes, at the moments when a token came out; 0 if it was not watched."""

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """The generated token ids of every request."""
        return tuple(r.tokens for r in self.requests)

    @property
    def prefill_end(self) -> Timestamp:
        """The moment when every request has its first token."""
        return max(r.stamps[0] for r in self.requests)

    def prefill_rate(self) -> Figure:
        """Return prompt tokens per second, from the start until every request has its first token."""
        return per_second(sum(r.prompt_tokens for r in self.requests), self.started, self.prefill_end)

    def decode_rate(self) -> Figure:
        """Return tokens per second while all requests decode: after every request has its first token, until one has
        its last.

        The rates of the requests are added. Each request is measured between its own tokens nearest to both ends. With
        the same two moments for all, a side that hands out a step's tokens one by one would lose most of the last step.

        Raises InvalidRequest if the requests never decode all at once.
        """
        begin, end = self.prefill_end, min(r.stamps[-1] for r in self.requests)
        if end.wall <= begin.wall:
            raise InvalidRequest("the requests never decode all at once: let them generate more tokens (-n)")
        rates = [r.token_rate(begin, end) for r in self.requests]
        cpu = [rate.cpu for rate in rates if rate.cpu is not None]
        return Figure(sum(rate.wall for rate in rates), sum(cpu) if len(cpu) == len(rates) else None)

    @property
    def decoded_tokens(self) -> int:
        """The number of tokens that `decode_rate` counts."""
        begin, end = self.prefill_end, min(r.stamps[-1] for r in self.requests)
        spans = [r.token_span(begin, end) for r in self.requests]
        return sum(last - first for first, last in spans)

    def total_seconds(self) -> Figure:
        """Return seconds from the start to the last token of all requests."""
        end = max(r.stamps[-1] for r in self.requests)
        return Figure(end.wall - self.started.wall, end.cpu - self.started.cpu)

    def ttft(self, request: int) -> Figure:
        """Return seconds from a request's submission to its first token."""
        r = self.requests[request]
        return Figure(r.stamps[0].wall - r.submit_time.wall, r.stamps[0].cpu - r.submit_time.cpu)

    def longest_gap(self, requests: Sequence[int]) -> Figure:
        """Return the longest time in seconds between two tokens of one of these requests."""
        gaps = (b.wall - a.wall for i in requests for a, b in pairwise(self.requests[i].stamps))
        return Figure(max(gaps))

    def kv_peak(self) -> Figure:
        """Return the most KV memory in use, in bytes."""
        return Figure(float(self.kv_bytes))


class TraceRecorder:
    """Records the trace of a run while it runs."""

    def __init__(self, work: Sequence[BenchRequest]) -> None:
        self.started = Timestamp.now()
        self.kv_bytes = 0
        self._work = work
        self._submit_times = [self.started] * len(work)
        self._tokens: list[list[int]] = [[] for _ in work]
        self._stamps: list[list[Timestamp]] = [[] for _ in work]

    def record_submission(self, request: int) -> None:
        """Record that a request is about to be submitted."""
        self._submit_times[request] = Timestamp.now()

    def record_token(self, request: int, token: int, stamp: Timestamp) -> int:
        """Record a request's next token, and return how many tokens the request has."""
        self._tokens[request].append(token)
        self._stamps[request].append(stamp)
        return len(self._tokens[request])

    def make_trace(self) -> RunTrace:
        """Return the trace of the run, at its end.

        Raises CortexError if a request has more or fewer tokens than it asked for, because every figure counts tokens.
        """
        for work, tokens in zip(self._work, self._tokens, strict=True):
            if len(tokens) != work.max_tokens:
                raise CortexError(
                    f"a request of the benchmark has {len(tokens)} of {work.max_tokens} tokens: no figure"
                )
        columns = zip(self._work, self._submit_times, self._tokens, self._stamps, strict=True)
        requests = tuple(RequestTrace(len(w.prompt), s, tuple(t), tuple(m)) for w, s, t, m in columns)
        return RunTrace(self.started, requests, self.kv_bytes)


def per_second(tokens: int, begin: Timestamp, end: Timestamp) -> Figure:
    """Return tokens per second between two moments, by wall time and by CPU time."""
    wall, cpu = end.wall - begin.wall, end.cpu - begin.cpu
    return Figure(tokens / wall, tokens / cpu if cpu > 0 else None)
