"""How much a figure changed between two runs, from a few noisy repetitions of each: trimmed means and their interval.

With ten or more repetitions, a tenth of the sorted ones is left out at each end. So a burst of other work on the
machine does not move the mean, and hardly its error. The source is Yuen, "The two-sample trimmed t for unequal
population variances", Biometrika 61, 1974. All calculations are on logarithms, because changes are ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TRIMMED = 0.1
FEWEST = 3
"""The fewest repetitions of each side that allow a statement about noise."""


@dataclass(frozen=True)
class Change:
    """New over old, minus 1: the estimate, and the ends of its interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Shift:
    """A change as a logarithm, with its variance and degrees of freedom, so that shifts can be subtracted."""

    mean: float
    variance: float
    freedom: float

    def less(self, other: Shift) -> Shift:
        """Return this shift minus `other` (Welch and Satterthwaite for the degrees of freedom)."""
        variance = self.variance + other.variance
        parts = self.variance**2 / self.freedom + other.variance**2 / other.freedom
        return Shift(self.mean - other.mean, variance, variance**2 / parts if parts else self.freedom)

    def change(self, doubt: float) -> Change:
        """Return the change with its interval. If the repetitions are like others, the interval misses the truth with
        probability `doubt`.
        """
        half_width = quantile(1 - doubt / 2, self.freedom) * math.sqrt(self.variance)
        low, mid, high = (math.expm1(x) for x in (self.mean - half_width, self.mean, self.mean + half_width))
        return Change(mid, low, high)


def shift(old: Sequence[float], new: Sequence[float]) -> Shift:
    """Return the shift from the repetitions of one run to those of another. Each has at least `FEWEST` figures, all
    positive.
    """
    (mean, variance, freedom), (mean_new, variance_new, freedom_new) = _trimmed(old), _trimmed(new)
    return Shift(mean_new, variance_new, freedom_new).less(Shift(mean, variance, freedom))


def by_round(values: Sequence[float], rounds: Sequence[int]) -> list[float]:
    """Return the median of each round. Without rounds, return the values."""
    if not rounds:
        return list(values)
    found: dict[int, list[float]] = {}
    for value, number in zip(values, rounds, strict=True):
        found.setdefault(number, []).append(value)
    return [statistics.median(each) for each in found.values()]


def _trimmed(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the trimmed mean of the logarithms, its variance, and its degrees of freedom."""
    logs = sorted(math.log(value) for value in values)
    count, cut = len(logs), int(TRIMMED * len(logs))
    kept = count - 2 * cut
    winsorized = [min(max(x, logs[cut]), logs[-1 - cut]) for x in logs]
    squares = statistics.variance(winsorized) * (count - 1)
    return statistics.fmean(logs[cut : count - cut]), squares / (kept * (kept - 1)), kept - 1


def quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t (Abramowitz and Stegun 26.7.5; the error is below 2 % from four degrees of
    freedom).
    """
    z = statistics.NormalDist().inv_cdf(probability)
    return z + sum(
        sum(factor * z**power for factor, power in terms) / (below * freedom**order)
        for order, (below, terms) in enumerate(_TERMS, 1)
    )


_TERMS = (
    (4, ((1, 3), (1, 1))),
    (96, ((5, 5), (16, 3), (3, 1))),
    (384, ((3, 7), (19, 5), (17, 3), (-15, 1))),
    (92_160, ((79, 9), (776, 7), (1_482, 5), (-1_920, 3), (-945, 1))),
)
