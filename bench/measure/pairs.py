"""Compares two contestants on a noisy machine: runs in pairs that take turns to go first, and the median ratio of the
pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from cortexmlx.bench.measure.trace import Figure, RunTrace


class BetterDirection(str, Enum):
    """Whether a higher or a lower figure is better. The value is the sign before a target such as `>= 1x`."""

    HIGHER = ">="
    LOWER = "<="


@dataclass(frozen=True)
class Measure:
    """A figure to compare: how a trace gives it, which direction is better, and the target ratio of ours to theirs."""

    name: str
    unit: str
    compute: Callable[[RunTrace], Figure]
    better: BetterDirection
    target: float


@dataclass(frozen=True)
class ComparisonCase:
    """One thing to compare with mlx-lm. Each repetition has its own prompts, the same for both sides."""

    name: str
    description: str
    """The case in one line."""
    run_ours: Callable[[int], RunTrace]
    """Runs a repetition, by its number, with cortexmlx."""
    run_theirs: Callable[[int], RunTrace]
    """Runs a repetition, by its number, with mlx-lm."""
    measures: tuple[Measure, ...]


@dataclass(frozen=True)
class Comparison:
    """The result of a case for one measure: the figures of both sides, pair by pair, in the order in which they ran."""

    case: str
    what: str
    measure: str
    unit: str
    better: BetterDirection
    target: float
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    ours_cpu: tuple[float, ...]
    theirs_cpu: tuple[float, ...]
    same_tokens: int
    """Requests with the same token ids on both sides."""
    requests: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratios of our figure to theirs, pair by pair."""
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def cpu_ratio(self) -> float | None:
        """The median of the pairs' ratios by CPU time; None if CPU time means nothing."""
        pairs = zip(self.ours_cpu, self.theirs_cpu, strict=True)
        return statistics.median(a / b for a, b in pairs) if self.ours_cpu else None

    @property
    def meets_target(self) -> bool:
        """Whether the median ratio meets the target."""
        return self.ratio >= self.target if self.better is BetterDirection.HIGHER else self.ratio <= self.target


def compare_case(case: ComparisonCase, pairs: int, on_run: Callable[[str], None] | None = None) -> list[Comparison]:
    """Run a case `pairs` times on both sides: ours then theirs, theirs then ours, and so on."""
    our_traces: list[RunTrace] = []
    their_traces: list[RunTrace] = []
    for pair in range(pairs):
        order = [("cortexmlx", case.run_ours, our_traces), ("mlx-lm", case.run_theirs, their_traces)]
        for name, run, traces in order if pair % 2 == 0 else order[::-1]:
            if on_run is not None:
                on_run(f"{case.name}, pair {pair + 1} of {pairs}: {name}")
            traces.append(run(pair))
    token_pairs = [
        (a, b)
        for our_trace, their_trace in zip(our_traces, their_traces, strict=True)
        for a, b in zip(our_trace.tokens, their_trace.tokens, strict=True)
    ]
    return [
        _make_comparison(case, m, our_traces, their_traces, sum(a == b for a, b in token_pairs), len(token_pairs))
        for m in case.measures
    ]


def _make_comparison(
    case: ComparisonCase,
    measure: Measure,
    our_traces: Sequence[RunTrace],
    their_traces: Sequence[RunTrace],
    same_tokens: int,
    requests: int,
) -> Comparison:
    a, b = [measure.compute(t) for t in our_traces], [measure.compute(t) for t in their_traces]
    a_cpu, b_cpu = (tuple(f.cpu for f in figures if f.cpu is not None) for figures in (a, b))
    complete = len(a_cpu) == len(a) and len(b_cpu) == len(b)
    return Comparison(
        case.name,
        case.description,
        measure.name,
        measure.unit,
        measure.better,
        measure.target,
        tuple(f.wall for f in a),
        tuple(f.wall for f in b),
        a_cpu if complete else (),
        b_cpu if complete else (),
        same_tokens,
        requests,
    )
