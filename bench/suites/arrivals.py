"""Requests that arrive at random, as people and programs send them: a seeded trace, and the waits of its users.

Arrivals are a Poisson process. Prompts and answers have ragged lengths. Most prompts begin with one of a few system
prompts. The terms are those of vLLM's serving benchmark: TTFT, TPOT, ITL, and goodput, the requests per second that met
the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cortexmlx.bench.measure.mlxlm import BatchSettings, MlxLmContestant
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.subject import CortexContestant
from cortexmlx.bench.measure.trace import BenchRequest, RequestTrace, RunTrace
from cortexmlx.engine import Engine

ROWS = 16
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Traffic:
    """A serving benchmark's random requests: number, rate, and log-uniform lengths between two ends, in tokens."""

    requests: int = 32
    rate: float = 1.0
    """Requests per second, on average."""
    prompt: tuple[int, int] = (16, 256)
    answer: tuple[int, int] = (16, 128)
    systems: int = 2
    """The number of system prompts."""
    system: int = 256
    """Tokens of a system prompt."""
    shared_fraction: float = 0.75
    """The share of prompts that begin with a system prompt."""

    @property
    def longest(self) -> int:
        """The tokens of the longest request."""
        return self.system + self.prompt[1] + self.answer[1]

    def draw_requests(self, prompts: PromptStream, seed: int) -> list[BenchRequest]:
        """Draw the requests of one run, in the order of their arrival."""
        random = np.random.default_rng(seed)
        systems = [prompts.next_prompt(self.system) for _ in range(self.systems)]
        arrivals = np.cumsum(random.exponential(1 / self.rate, self.requests))
        lengths = prompts.draw_lengths(self.requests, *self.prompt)
        answers = prompts.draw_lengths(self.requests, *self.answer)
        work = []
        for arrival_seconds, length, answer in zip(arrivals, lengths, answers, strict=True):
            shared = systems[random.integers(self.systems)] if random.random() < self.shared_fraction else ()
            work.append(
                BenchRequest(shared + prompts.next_prompt(length), answer, arrival_seconds=float(arrival_seconds))
            )
        return work


@dataclass(frozen=True)
class LatencyLimits:
    """The latency limits that a good request keeps: seconds to its first token, and seconds per token after it."""

    ttft: float = 2.0
    tpot: float = 0.2


def tpot(request: RequestTrace) -> float:
    """Return the time per output token: seconds per token after the first."""
    return (request.stamps[-1].wall - request.stamps[0].wall) / (len(request.stamps) - 1)


def ttft(request: RequestTrace) -> float:
    """Return the time to first token: seconds from the arrival."""
    return request.stamps[0].wall - request.submit_time.wall


@dataclass
class TrafficResult:
    """The runs of one contestant, and the figures of all of them together."""

    name: str
    promise: LatencyLimits
    traces: list[RunTrace] = field(default_factory=list)

    @property
    def requests(self) -> list[RequestTrace]:
        """The requests of all runs."""
        return [request for trace in self.traces for request in trace.requests]

    @property
    def tokens(self) -> int:
        """Generated tokens of all runs."""
        return sum(len(request.tokens) for request in self.requests)

    def throughput(self) -> list[float]:
        """Return generated tokens per second for each run, from its start to its last token."""
        return [sum(map(len, trace.tokens)) / trace.total_seconds().wall for trace in self.traces]

    def goodput(self) -> list[float]:
        """Return the requests per second that keep the latency limits, for each run."""
        return [sum(map(self._is_good, trace.requests)) / trace.total_seconds().wall for trace in self.traces]

    def _is_good(self, request: RequestTrace) -> bool:
        """Return whether a request kept the latency limits."""
        return ttft(request) <= self.promise.ttft and tpot(request) <= self.promise.tpot

    @property
    def good_count(self) -> int:
        """The number of requests that kept the latency limits."""
        return sum(map(self._is_good, self.requests))

    def waits(self, requests: Sequence[RequestTrace] | None = None) -> dict[str, list[float]]:
        """Return the seconds of each kind of wait (TTFT, TPOT, ITL), for some requests or for all."""
        selected_requests = self.requests if requests is None else requests
        gaps = [b.wall - a.wall for request in selected_requests for a, b in pairwise(request.stamps)]
        return {"TTFT": [ttft(r) for r in selected_requests], "TPOT": [tpot(r) for r in selected_requests], "ITL": gaps}


def run_traffic(
    engine: Engine,
    traffic: Traffic,
    promise: LatencyLimits,
    repetitions: int,
    seed: int,
    against: bool,
    results: list[TrafficResult],
    on_run: Callable[[str], None],
) -> None:
    """Run the traffic `repetitions` times, each time with new requests, and put the results `results` a list.

    With `against`, mlx-lm's batch generator gets the same requests on the same weights. The sides take turns to go
    first. After an interrupt, the list has whole repetitions only.
    """
    contestants: list[CortexContestant | MlxLmContestant] = [CortexContestant(engine)]
    if against:
        contestants.append(
            MlxLmContestant(engine.inspect(lambda core: core.loaded), BatchSettings(completion_batch_size=ROWS))
        )
    results += [TrafficResult(contestant.name, promise) for contestant in contestants]
    for repetition in range(-1, repetitions):
        finished_runs: list[tuple[TrafficResult, RunTrace]] = []
        order = list(zip(contestants, results, strict=True))
        for side, result in order if repetition % 2 == 0 else order[::-1]:
            label = "warming up" if repetition < 0 else f"trace, run {repetition + 1} of {repetitions}"
            on_run(f"{label}: {side.name}, {traffic.requests} requests at {traffic.rate:g} a second")
            finished_runs.append((result, side.run(_make_requests(engine, traffic, seed, repetition))))
        for result, trace in finished_runs if repetition >= 0 else ():
            result.traces.append(trace)


def _make_requests(engine: Engine, traffic: Traffic, seed: int, repetition: int) -> list[BenchRequest]:
    """Return a run's requests, the same for both sides. The uncounted first run has a few that arrive at once."""
    number = 1_000_003 * (seed + 1) + repetition
    prompts = PromptStream(engine.info.vocab_size, number)
    if repetition < 0:
        return [BenchRequest(prompts.next_prompt(n), 8) for n in (20, 100, 20, 100)]
    return traffic.draw_requests(prompts, number)
