"""Compares this run with a saved one: what changed by more than the noise, what did not, and what is unclear.

Runs of different days cannot be paired. But each repetition can be measured in units of the yardstick's samples around
it. This removes slow hours as a whole, and much of a burst.

The noise is estimated from the rounds of a run. Each round has an engine that was opened for it. Repetitions with one
engine are more alike than repetitions with two engines, whose weights have other places in memory.

A figure counts as slower only if it is slower both by the clock and without the machine's share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from statistics import median

from cortexmlx.bench.changes.saved import SavedRun
from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.pairs import BetterDirection
from cortexmlx.bench.report.section import FigureSeries, ReportSection, ReportTable
from cortexmlx.bench.report.text import format_number
from cortexmlx.errors import InvalidRequest

TRIMMED = 0.1
FEWEST = 3
"""The fewest repetitions of each side that allow a statement about noise."""


@dataclass(frozen=True)
class FigureChange:
    """The relative change of a figure, new over old minus 1: an estimate, and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class LogChange:
    """The logarithm of a change, with its variance and degrees of freedom, so that changes can be subtracted."""

    mean: float
    variance: float
    freedom: float

    def subtract(self, other: LogChange) -> LogChange:
        """Return this change minus `other` (Welch and Satterthwaite for the degrees of freedom)."""
        variance = self.variance + other.variance
        parts = self.variance**2 / self.freedom + other.variance**2 / other.freedom
        return LogChange(self.mean - other.mean, variance, variance**2 / parts if parts else self.freedom)

    def to_figure_change(self, doubt: float) -> FigureChange:
        """Return the relative change with its interval, which misses the truth with probability `doubt` if the
        repetitions are like others.
        """
        half_width = student_quantile(1 - doubt / 2, self.freedom) * math.sqrt(self.variance)
        low, mid, high = (math.expm1(x) for x in (self.mean - half_width, self.mean, self.mean + half_width))
        return FigureChange(mid, low, high)


def log_change(old: Sequence[float], new: Sequence[float]) -> LogChange:
    """Return the change from the repetitions of one run to those of another. Each has at least `FEWEST` figures, all
    positive.
    """
    (mean, variance, freedom), (mean_new, variance_new, freedom_new) = _trimmed_log_mean(old), _trimmed_log_mean(new)
    return LogChange(mean_new, variance_new, freedom_new).subtract(LogChange(mean, variance, freedom))


def round_medians(values: Sequence[float], rounds: Sequence[int]) -> list[float]:
    """Return the median of each round's values. Without rounds, return the values."""
    if not rounds:
        return list(values)
    found: dict[int, list[float]] = {}
    for value, opened in zip(values, rounds, strict=True):
        found.setdefault(opened, []).append(value)
    return [statistics.median(each) for each in found.values()]


def _trimmed_log_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the trimmed mean of the values' logarithms, its variance, and its degrees of freedom."""
    logs = sorted(math.log(value) for value in values)
    count, cut = len(logs), int(TRIMMED * len(logs))
    kept = count - 2 * cut
    winsorized = [min(max(x, logs[cut]), logs[-1 - cut]) for x in logs]
    squares = statistics.variance(winsorized) * (count - 1)
    return statistics.fmean(logs[cut : count - cut]), squares / (kept * (kept - 1)), kept - 1


def student_quantile(probability: float, freedom: float) -> float:
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


DOUBT = 0.01
"""The probability that any figure of a run is called changed though it is not. It assumes that the repetitions are like
those of any other hour.
"""

LEAST = 0.02
"""Smaller changes are not reported: a program's place in memory alone makes as much of a difference."""

WIDE = 0.05
"""A figure is called the same if its whole interval is within this distance of 0."""


_MOST = 9.99
"""Larger changes are written as this one."""


class FigureVerdict(str, Enum):
    """How a figure compares with the saved run: slower, faster, the same, or undecided."""

    SLOWER = "SLOWER"
    FASTER = "faster"
    SAME = "same"
    MACHINE = "the machine"
    """The figure changed by the clock, and the machine explains more than half of it."""
    UNCLEAR = "too noisy"
    FEW = "too few runs"


@dataclass(frozen=True)
class FigureOutcome:
    """The comparison of one figure that both runs have, with a verdict."""

    series: FigureSeries
    then: float
    """The median of the saved run."""
    now: float
    """The median of this run."""
    change: FigureChange | None
    """The change without the machine's own change; above 0 is better now. None if there are too few repetitions."""
    verdict: FigureVerdict


_DECISIVE = {"chip": "chip", "device": "MLX's device", "cpus": "CPUs", "blas": "BLAS"}
"""The properties of a machine that must be the same, each with its name for people."""


def check_machine(saved: SavedRun, here: BenchMachine, path: Path) -> None:
    """Raise InvalidRequest if this machine differs too much from the saved run's for their figures to be compared."""
    then = saved.machine
    found = [
        f"{what}: {getattr(then, name)} then, {getattr(here, name)} now"
        for name, what in _DECISIVE.items()
        if getattr(then, name) != getattr(here, name)
    ]
    if found:
        hint = ". OPENBLAS_NUM_THREADS=N sets the threads" if then.blas != here.blas else ""
        raise InvalidRequest(f"{path} cannot be compared with this machine: {'; '.join(found)}{hint}")


def check_model(saved: SavedRun, now: SavedRun, path: Path) -> None:
    """Raise InvalidRequest if the saved run measured another model, or the same model with other settings."""
    then, found = saved.model, []
    if then.get("files") != now.model.get("files"):
        found.append(f"the models' files differ ({then.get('name', 'no model')}, {now.model.get('name', 'no model')})")
    elif then.get("dtype") != now.model.get("dtype"):
        found.append(f"weights are {then.get('dtype')} and {now.model.get('dtype')}")
    for name in sorted(saved.settings.keys() & now.settings.keys()):
        if saved.settings[name] != now.settings[name]:
            found.append(f"{name}: {saved.settings[name]} then, {now.settings[name]} now")
    if found:
        raise InvalidRequest(f"{path} cannot be compared with this run: {'; '.join(found)}")


def compare_figures(saved: SavedRun, now: SavedRun) -> list[FigureOutcome]:
    """Compare every figure that both runs have."""
    known = {_series_key(series): series for series in saved.series}
    pairs = [(known[_series_key(series)], series) for series in now.series if _series_key(series) in known]
    return [_compare_series(old, new, _machine_change(saved, now, new), DOUBT / len(pairs)) for old, new in pairs]


def _series_key(series: FigureSeries) -> tuple[str, str, str]:
    return series.name, series.unit, series.clock


def _machine_change(saved: SavedRun, now: SavedRun, series: FigureSeries) -> LogChange | None:
    """Return how much faster the machine is now, by the yardstick of the series. None if there are too few samples."""
    name = f"{series.machine}, {series.clock}"
    old, new = saved.yardstick.get(name, ()), now.yardstick.get(name, ())
    return log_change(new, old) if min(len(old), len(new)) >= FEWEST else None  # seconds: less is faster


def _compare_series(old: FigureSeries, new: FigureSeries, machine: LogChange | None, doubt: float) -> FigureOutcome:
    """Compare a figure's repetitions in both runs, without the change of the `machine`. The interval misses the
    truth with probability `doubt`.
    """
    then, there = median(old.values), median(new.values)
    rounds = [round_medians(series.values, series.rounds) for series in (old, new)]
    if min(map(len, rounds)) < FEWEST or min(*old.values, *new.values) <= 0:
        return FigureOutcome(new, then, there, None, FigureVerdict.FEW)
    clock = _improvement(new.better, *rounds)
    if old.beside and new.beside:
        engine = _improvement(
            new.better, *(round_medians(_normalize_by_machine(series), series.rounds) for series in (old, new))
        )
    else:
        engine = clock if machine is None else clock.subtract(machine)
    by_clock, change = clock.to_figure_change(doubt), engine.to_figure_change(doubt)
    return FigureOutcome(new, then, there, change, _judge(by_clock, change))


def _improvement(better: BetterDirection, old: Sequence[float], new: Sequence[float]) -> LogChange:
    """Return the change from `old` to `new`, above 0 if it is for the better."""
    return log_change(old, new) if better is BetterDirection.HIGHER else log_change(new, old)


def _normalize_by_machine(series: FigureSeries) -> list[float]:
    """Return each repetition in units of the machine's speed around it. A rate is multiplied by the yardstick's
    seconds, a time divided by them.
    """
    pairs = zip(series.values, series.beside, strict=True)
    return [value * beside if series.better is BetterDirection.HIGHER else value / beside for value, beside in pairs]


def _judge(by_clock: FigureChange, change: FigureChange) -> FigureVerdict:
    """Return the verdict on a figure, from its change by the clock and its change without the machine's own."""
    if by_clock.estimate < 0 and change.high < 0 and change.estimate <= -LEAST:
        return FigureVerdict.SLOWER
    if by_clock.estimate > 0 and change.low > 0 and change.estimate >= LEAST:
        return FigureVerdict.FASTER
    if change.low >= -WIDE and change.high <= WIDE:
        return FigureVerdict.SAME
    differs = by_clock.high < 0 or by_clock.low > 0
    return (
        FigureVerdict.MACHINE
        if differs and abs(change.estimate) < abs(by_clock.estimate) / 2
        else FigureVerdict.UNCLEAR
    )


def has_slower_figure(found: Sequence[FigureOutcome]) -> bool:
    """Return whether any figure is slower beyond the noise."""
    return any(outcome.verdict is FigureVerdict.SLOWER for outcome in found)


def changes_section(saved: SavedRun, now: SavedRun, found: Sequence[FigureOutcome], path: Path) -> ReportSection:
    """Return the report's section about the comparison: every figure's outcome, and what a reader must know to trust
    it.
    """
    table = ReportTable(
        ("figure", "then", "now", "change, %", "verdict"), tuple(map(_table_row, found)), 1, ("then", "now")
    )
    records = tuple(
        {
            "figure": o.series.name,
            "clock": o.series.clock,
            "unit": o.series.unit,
            "then": o.then,
            "now": o.now,
            "change": None if o.change is None else o.change.estimate,
            "low": None if o.change is None else o.change.low,
            "high": None if o.change is None else o.change.high,
            "verdict": o.verdict.value,
        }
        for o in found
    )
    return ReportSection("compare", f"Compared with {path.name}", (table,), tuple(_notes(saved, now, found)), records)


def _table_row(o: FigureOutcome) -> tuple[str, ...]:
    if o.change is None:
        change = ""
    else:
        estimate, low, high = (f"{100 * min(x, _MOST):+.1f}" for x in (o.change.estimate, o.change.low, o.change.high))
        change = f"{estimate} ({low} to {high})"
    name = o.series.name if o.series.clock == "wall" else f"{o.series.name} ({o.series.clock})"
    return (name, format_number(o.then), format_number(o.now), change, o.verdict.value)


def _notes(saved: SavedRun, now: SavedRun, found: Sequence[FigureOutcome]) -> Iterator[str]:
    """Yield the lines below the table: the conclusion, how to read the table, and what else differs."""
    yield _conclusion(found)
    yield (
        "(CPU): by CPU time. "
        f"change: % better (+) or worse (-) than then, without what the machine itself changed, and the interval in "
        f"which it lies with {1 - DOUBT:.0%} for all figures together. Less than {LEAST:.0%} is never called a change."
    )
    yield from _machine_notes(saved, now)
    yield from _machine_differences(saved.machine, now.machine)
    names = {_series_key(s): s.name for s in (*saved.series, *now.series)}
    for mine, others, when in ((saved, now, "only then"), (now, saved, "only now")):
        keys = {_series_key(series) for series in others.series}
        alone = dict.fromkeys(names[_series_key(s)] for s in mine.series if _series_key(s) not in keys)
        if alone:
            yield f"{when}: {', '.join(alone)}"


def _conclusion(found: Sequence[FigureOutcome]) -> str:
    """Return which figures are slower, or that none is."""
    names = list(dict.fromkeys(o.series.name for o in found if o.verdict is FigureVerdict.SLOWER))
    if names:
        return f"slower beyond the noise: {', '.join(names)}"
    if not found:
        return "the runs have no figure in common: nothing was compared"
    open_ = [o for o in found if o.verdict in (FigureVerdict.UNCLEAR, FigureVerdict.FEW, FigureVerdict.MACHINE)]
    more = f"; {len(open_)} of {len(found)} figures cannot be told: a quieter machine or more runs (-r) help"
    return f"nothing is slower beyond the noise{more if open_ else ''}"


def _machine_notes(saved: SavedRun, now: SavedRun) -> Iterator[str]:
    """Yield lines about how the machine's own speed and load changed."""
    both = [name for name in now.yardstick if name in saved.yardstick]
    changes = [
        (name, log_change(now.yardstick[name], saved.yardstick[name]))
        for name in both
        if _has_enough_samples(saved, now, name)
    ]
    if changes:
        told = ", ".join(f"{name} {s.to_figure_change(DOUBT).estimate:+.1%}" for name, s in changes)
        yield f"the machine itself, by work that has nothing to do with this program: {told}"
    busy = [f"{m.load} {when}" for m, when in ((saved.machine, "then"), (now.machine, "now")) if m.load > m.cpus / 2]
    if busy:
        yield f"other work was going on: load {' and '.join(busy)} on {now.machine.cpus} CPUs"


def _has_enough_samples(saved: SavedRun, now: SavedRun, name: str) -> bool:
    return min(len(saved.yardstick[name]), len(now.yardstick[name])) >= FEWEST


def _machine_differences(then: BenchMachine, here: BenchMachine) -> Iterator[str]:
    """Yield the differences of the machines that still allow a comparison. They may be the cause of a change."""
    for name in (field.name for field in fields(BenchMachine)):
        if name not in (*_DECISIVE, "load") and getattr(then, name) != getattr(here, name):
            yield f"{name.replace('_', '-')} was {getattr(then, name)} then, is {getattr(here, name)} now"
