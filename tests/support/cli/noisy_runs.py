"""Saved runs of an engine on a machine whose noise is known: nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cortexmlx.bench.changes.saved import SavedRun
from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.pairs import BetterDirection
from cortexmlx.bench.report.section import FigureSeries

MACHINE = BenchMachine.detect()
FIGURES = (("pp64, block 32", "products"), ("tg16, block 32", "memory"))


@dataclass(frozen=True)
class Noise:
    """All as logarithms. `each`: of a repetition, and a third of it of the yardstick; `tails`: degrees of freedom of
    Student's t (0: normal). `engines`: of an engine that was opened, and so of a whole round. `hour`: by how much the
    machine is slower at the end of a run than at its beginning; and, for each run anew, at all. `bursts`: how many
    moments are slowed by other programs, by a factor of e on average.
    """

    each: float = 0.03
    tails: int = 0
    engines: float = 0.0
    hour: float = 0.0
    bursts: float = 0.0


def noisy_run(seed: int, noise: Noise, *, engine: float = 1.0, rounds: int = 8, repetitions: int = 2) -> SavedRun:
    """A run of an engine of such a speed: `rounds` with so many `repetitions` of two figures by two clocks. A burst is
    on the wall's clock alone.
    """
    random = np.random.default_rng(seed)
    count = rounds * repetitions
    slow = noise.hour * (random.normal() + np.linspace(0, 1, count))

    def spread(size: float, shape: tuple[int, ...]) -> np.ndarray:
        drawn = random.standard_t(noise.tails, shape) if noise.tails else random.normal(0, 1, shape)
        return np.asarray(size * drawn)

    def burst() -> np.ndarray:
        return random.exponential(1, count) * (random.random(count) < noise.bursts)

    series, yardstick = [], {}
    for name, part in FIGURES:
        opened = np.repeat(spread(noise.engines, (rounds,)), repetitions)
        for clock in ("wall", "CPU"):
            burst_of_both = burst() if clock == "wall" else 0.0
            beside = np.exp(slow + spread(noise.each / 3, (count,)) + burst_of_both)
            rates = 100 * engine * np.exp(-slow - opened - spread(noise.each, (count,)) - burst_of_both)
            yardstick[f"{part}, {clock}"] = tuple(beside.tolist())
            numbers = tuple(n for n in range(rounds) for _ in range(repetitions))
            values = tuple(rates.tolist())
            series.append(
                FigureSeries(
                    name, "t/s", BetterDirection.HIGHER, values, part, clock, yardstick[f"{part}, {clock}"], numbers
                )
            )
    model = {"files": "a", "dtype": "float32", "name": "m"}
    return SavedRun(MACHINE, model, {"attention": "auto"}, yardstick, tuple(series))
