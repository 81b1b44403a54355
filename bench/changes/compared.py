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
        """Return the relative change. Its interval misses the truth with chance `doubt` if repetitions are typical."""
        half_width = student_quantile(1 - doubt / 2, self.freedom) * math.sqrt(self.variance)
        low, mid, high = (math.expm1(x) for x in (self.mean - half_width, self.mean, self.mean + half_width))
        return FigureChange(mid, low, high)


def log_change(old: Sequence[float], new: Sequence[float]) -> LogChange:
    """Return the change from `old` to `new`, the repetitions of two runs: each at least `FEWEST` positive figures."""
    (mean, variance, freedom), (mean_new, variance_new, freedom_new) = _trimmed_log_mean(old), _trimmed_log_mean(new)
    return LogChange(mean_new, variance_new, freedom_new).subtract(LogChange(mean, variance, freedom))


def round_medians(values: Sequence[float], rounds: Sequence[int]) -> list[float]:
    """Return the median of each round's values. Without rounds, return the values."""
    if not rounds:
        return list(values)
    values_by_round: dict[int, list[float]] = {}
    for value, round_number in zip(values, rounds, strict=True):
        values_by_round.setdefault(round_number, []).append(value)
    return [statistics.median(each) for each in values_by_round.values()]


def _trimmed_log_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the trimmed mean of the values' logarithms, its variance, and its degrees of freedom."""
    logs = sorted(math.log(value) for value in values)
    count, trim_count = len(logs), int(TRIMMED * len(logs))
    kept_count = count - 2 * trim_count
    winsorized_logs = [min(max(x, logs[trim_count]), logs[-1 - trim_count]) for x in logs]
    squares = statistics.variance(winsorized_logs) * (count - 1)
    return (
        statistics.fmean(logs[trim_count : count - trim_count]),
        squares / (kept_count * (kept_count - 1)),
        kept_count - 1,
    )


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t (Abramowitz and Stegun 26.7.5; error below 2 % from four degrees of freedom)."""
    z = statistics.NormalDist().inv_cdf(probability)
    return z + sum(
        sum(factor * z**power for factor, power in terms) / (divisor * freedom**order)
        for order, (divisor, terms) in enumerate(_TERMS, 1)
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

MIN_CHANGE = 0.02
"""Smaller changes are not reported: a program's place in memory alone makes as much of a difference."""

WIDE = 0.05
"""A figure is called the same if its whole interval is within this distance of 0."""


_MAX_SHOWN = 9.99
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
    saved_median: float
    """The median of the saved run."""
    current_median: float
    """The median of this run."""
    change: FigureChange | None
    """The change without the machine's own change; above 0 is better now. None if there are too few repetitions."""
    verdict: FigureVerdict


_DECISIVE = {"chip": "chip", "device": "MLX's device", "cpus": "CPUs", "blas": "BLAS"}
"""The properties of a machine that must be the same, each with its name for people."""


def check_machine(saved_run: SavedRun, current_machine: BenchMachine, path: Path) -> None:
    """Raise InvalidRequest if this machine differs too much from the saved run's for their figures to be compared."""
    saved_machine = saved_run.machine
    differences = [
        f"{label}: {getattr(saved_machine, name)} then, {getattr(current_machine, name)} now"
        for name, label in _DECISIVE.items()
        if getattr(saved_machine, name) != getattr(current_machine, name)
    ]
    if differences:
        hint = ". OPENBLAS_NUM_THREADS=N sets the threads" if saved_machine.blas != current_machine.blas else ""
        raise InvalidRequest(f"{path} cannot be compared with this machine: {'; '.join(differences)}{hint}")


def check_model(saved_run: SavedRun, current_run: SavedRun, path: Path) -> None:
    """Raise InvalidRequest if the saved run measured another model, or the same model with other settings."""
    saved_model, differences = saved_run.model, []
    if saved_model.get("files") != current_run.model.get("files"):
        differences.append(
            f"the models' files differ ({saved_model.get('name', 'no model')}, "
            f"{current_run.model.get('name', 'no model')})"
        )
    elif saved_model.get("dtype") != current_run.model.get("dtype"):
        differences.append(f"weights are {saved_model.get('dtype')} and {current_run.model.get('dtype')}")
    for name in sorted(saved_run.settings.keys() & current_run.settings.keys()):
        if saved_run.settings[name] != current_run.settings[name]:
            differences.append(f"{name}: {saved_run.settings[name]} then, {current_run.settings[name]} now")
    if differences:
        raise InvalidRequest(f"{path} cannot be compared with this run: {'; '.join(differences)}")


def compare_figures(saved_run: SavedRun, current_run: SavedRun) -> list[FigureOutcome]:
    """Compare every figure that both runs have."""
    saved_by_key = {_series_key(series): series for series in saved_run.series}
    pairs = [
        (saved_by_key[_series_key(series)], series)
        for series in current_run.series
        if _series_key(series) in saved_by_key
    ]
    return [
        _compare_series(
            saved_series, current_series, _machine_change(saved_run, current_run, current_series), DOUBT / len(pairs)
        )
        for saved_series, current_series in pairs
    ]


def _series_key(series: FigureSeries) -> tuple[str, str, str]:
    return series.name, series.unit, series.clock


def _machine_change(saved_run: SavedRun, current_run: SavedRun, series: FigureSeries) -> LogChange | None:
    """Return how much faster the machine is now, by the yardstick of the series. None if there are too few samples."""
    name = f"{series.machine}, {series.clock}"
    saved_seconds, current_seconds = saved_run.yardstick.get(name, ()), current_run.yardstick.get(name, ())
    return (
        log_change(current_seconds, saved_seconds) if min(len(saved_seconds), len(current_seconds)) >= FEWEST else None
    )  # seconds: less is faster


def _compare_series(
    saved_series: FigureSeries, current_series: FigureSeries, machine_change: LogChange | None, doubt: float
) -> FigureOutcome:
    """Compare a figure in both runs, without the machine's own change. The interval errs with probability `doubt`."""
    saved_median, current_median = median(saved_series.values), median(current_series.values)
    rounds = [round_medians(series.values, series.rounds) for series in (saved_series, current_series)]
    if min(map(len, rounds)) < FEWEST or min(*saved_series.values, *current_series.values) <= 0:
        return FigureOutcome(current_series, saved_median, current_median, None, FigureVerdict.FEW)
    clock = _improvement(current_series.better, *rounds)
    if saved_series.beside and current_series.beside:
        engine = _improvement(
            current_series.better,
            *(round_medians(_normalize_by_machine(series), series.rounds) for series in (saved_series, current_series)),
        )
    else:
        engine = clock if machine_change is None else clock.subtract(machine_change)
    by_clock, change = clock.to_figure_change(doubt), engine.to_figure_change(doubt)
    return FigureOutcome(current_series, saved_median, current_median, change, _judge(by_clock, change))


def _improvement(better: BetterDirection, old: Sequence[float], new: Sequence[float]) -> LogChange:
    """Return the change from `old` to `new`, above 0 if it is for the better."""
    return log_change(old, new) if better is BetterDirection.HIGHER else log_change(new, old)


def _normalize_by_machine(series: FigureSeries) -> list[float]:
    """Return each value in units of the machine's speed then: rate * yardstick seconds, or time / yardstick seconds."""
    pairs = zip(series.values, series.beside, strict=True)
    return [
        value * yardstick_seconds if series.better is BetterDirection.HIGHER else value / yardstick_seconds
        for value, yardstick_seconds in pairs
    ]


def _judge(by_clock: FigureChange, change: FigureChange) -> FigureVerdict:
    """Return the verdict on a figure, from its change by the clock and its change without the machine's own."""
    if by_clock.estimate < 0 and change.high < 0 and change.estimate <= -MIN_CHANGE:
        return FigureVerdict.SLOWER
    if by_clock.estimate > 0 and change.low > 0 and change.estimate >= MIN_CHANGE:
        return FigureVerdict.FASTER
    if change.low >= -WIDE and change.high <= WIDE:
        return FigureVerdict.SAME
    differs = by_clock.high < 0 or by_clock.low > 0
    return (
        FigureVerdict.MACHINE
        if differs and abs(change.estimate) < abs(by_clock.estimate) / 2
        else FigureVerdict.UNCLEAR
    )


def has_slower_figure(outcomes: Sequence[FigureOutcome]) -> bool:
    """Return whether any figure is slower beyond the noise."""
    return any(outcome.verdict is FigureVerdict.SLOWER for outcome in outcomes)


def changes_section(
    saved_run: SavedRun, current_run: SavedRun, outcomes: Sequence[FigureOutcome], path: Path
) -> ReportSection:
    """Return the section about the comparison: every figure's outcome, and what a reader must know to trust it."""
    table = ReportTable(
        ("figure", "then", "now", "change, %", "verdict"), tuple(map(_table_row, outcomes)), 1, ("then", "now")
    )
    records = tuple(
        {
            "figure": o.series.name,
            "clock": o.series.clock,
            "unit": o.series.unit,
            "then": o.saved_median,
            "now": o.current_median,
            "change": None if o.change is None else o.change.estimate,
            "low": None if o.change is None else o.change.low,
            "high": None if o.change is None else o.change.high,
            "verdict": o.verdict.value,
        }
        for o in outcomes
    )
    return ReportSection(
        "compare", f"Compared with {path.name}", (table,), tuple(_notes(saved_run, current_run, outcomes)), records
    )


def _table_row(o: FigureOutcome) -> tuple[str, ...]:
    if o.change is None:
        change = ""
    else:
        estimate, low, high = (
            f"{100 * min(x, _MAX_SHOWN):+.1f}" for x in (o.change.estimate, o.change.low, o.change.high)
        )
        change = f"{estimate} ({low} to {high})"
    name = o.series.name if o.series.clock == "wall" else f"{o.series.name} ({o.series.clock})"
    return (name, format_number(o.saved_median), format_number(o.current_median), change, o.verdict.value)


def _notes(saved_run: SavedRun, current_run: SavedRun, outcomes: Sequence[FigureOutcome]) -> Iterator[str]:
    """Yield the lines below the table: the conclusion, how to read the table, and what else differs."""
    yield _conclusion(outcomes)
    yield (
        "(CPU): by CPU time. change: % better (+) or worse (-) than then, without what the machine itself changed, "
        f"and the interval in which it lies with {1 - DOUBT:.0%} for all figures together. Less than {MIN_CHANGE:.0%} "
        "is never called a change."
    )
    yield from _machine_notes(saved_run, current_run)
    yield from _machine_differences(saved_run.machine, current_run.machine)
    names = {_series_key(s): s.name for s in (*saved_run.series, *current_run.series)}
    for run, other_run, label in ((saved_run, current_run, "only then"), (current_run, saved_run, "only now")):
        keys = {_series_key(series) for series in other_run.series}
        unshared_names = dict.fromkeys(names[_series_key(s)] for s in run.series if _series_key(s) not in keys)
        if unshared_names:
            yield f"{label}: {', '.join(unshared_names)}"


def _conclusion(outcomes: Sequence[FigureOutcome]) -> str:
    """Return which figures are slower, or that none is."""
    names = list(dict.fromkeys(o.series.name for o in outcomes if o.verdict is FigureVerdict.SLOWER))
    if names:
        return f"slower beyond the noise: {', '.join(names)}"
    if not outcomes:
        return "the runs have no figure in common: nothing was compared"
    undecided = [o for o in outcomes if o.verdict in (FigureVerdict.UNCLEAR, FigureVerdict.FEW, FigureVerdict.MACHINE)]
    undecided_note = (
        f"; {len(undecided)} of {len(outcomes)} figures cannot be told: a quieter machine or more runs (-r) help"
    )
    return f"nothing is slower beyond the noise{undecided_note if undecided else ''}"


def _machine_notes(saved_run: SavedRun, current_run: SavedRun) -> Iterator[str]:
    """Yield lines about how the machine's own speed and load changed."""
    shared_names = [name for name in current_run.yardstick if name in saved_run.yardstick]
    changes = [
        (name, log_change(current_run.yardstick[name], saved_run.yardstick[name]))
        for name in shared_names
        if _has_enough_samples(saved_run, current_run, name)
    ]
    if changes:
        changes_text = ", ".join(f"{name} {s.to_figure_change(DOUBT).estimate:+.1%}" for name, s in changes)
        yield f"the machine itself, by work that has nothing to do with this program: {changes_text}"
    load_texts = [
        f"{m.load} {label}"
        for m, label in ((saved_run.machine, "then"), (current_run.machine, "now"))
        if m.load > m.cpus / 2
    ]
    if load_texts:
        yield f"other work was going on: load {' and '.join(load_texts)} on {current_run.machine.cpus} CPUs"


def _has_enough_samples(saved_run: SavedRun, current_run: SavedRun, name: str) -> bool:
    return min(len(saved_run.yardstick[name]), len(current_run.yardstick[name])) >= FEWEST


def _machine_differences(saved_machine: BenchMachine, current_machine: BenchMachine) -> Iterator[str]:
    """Yield the differences of the machines that still allow a comparison. They may be the cause of a change."""
    for name in (field.name for field in fields(BenchMachine)):
        before, now = getattr(saved_machine, name), getattr(current_machine, name)
        if name not in (*_DECISIVE, "load") and before != now:
            yield f"{name.replace('_', '-')} was {before} then, is {now} now"
