"""Measures how fast the machine itself is at the moment, by fixed pieces of work that no change of this program
affects.

Figures of today and of last week differ for two reasons. The program changed, or the machine was busier, hotter or on
battery. The yardstick is measured between the repetitions, and tells which.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

import mlx.core as mx

from cortexmlx.bench.measure.trace import Timestamp

COMPUTE, MEMORY = "products", "memory"
"""Parts of the machine: matrix products, which limit a prompt, and reading memory, which limits a decode step."""

_SIZE, _PRODUCTS = 640, 4
_NUMBERS = 32 << 20
"""128 MiB of float32: more than caches hold, as weights are."""


class Yardstick:
    """Times two fixed pieces of work, one limited by compute and one by memory, to tell the machine's own speed."""

    def __init__(self) -> None:
        self._square = mx.random.normal((_SIZE, _SIZE), key=mx.random.key(0)) / _SIZE
        self._column = mx.random.normal((_SIZE, 1), key=mx.random.key(1))
        self._wide = mx.ones((_NUMBERS // _SIZE, _SIZE))
        mx.eval(self._square, self._column, self._wide)
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._time_work()
        self._samples.clear()  # the first run is slow

    def add_sample(self) -> None:
        """Time both pieces of work once. It takes about a tenth of a second on two cores of a server."""
        self._time_work()

    def _time_work(self) -> None:
        """Do both pieces of work, and keep their times."""
        begin = Timestamp.now()
        product = self._square
        for _ in range(_PRODUCTS):
            product = product @ self._square
        mx.eval(product)
        middle = Timestamp.now()
        mx.eval(self._wide @ self._column)
        self._add_time(COMPUTE, begin, middle)
        self._add_time(MEMORY, middle, Timestamp.now())

    @property
    def bytes(self) -> int:
        """Bytes of MLX's memory that the yardstick's arrays take."""
        return self._square.nbytes + self._column.nbytes + self._wide.nbytes

    @property
    def sample_count(self) -> int:
        """The number of samples so far."""
        return len(self._samples[f"{COMPUTE}, wall"])

    def seconds_around(self, sample_index: int) -> dict[str, float]:
        """Return the yardstick's seconds around a measured run, by part (compute, memory) and clock.

        This is the geometric mean of sample number `sample_index`, just before the work, and of the next sample if
        there is one.
        """
        around = {name: values[sample_index : sample_index + 2] for name, values in self._samples.items()}
        return {name: statistics.geometric_mean(values) for name, values in around.items()}

    def _add_time(self, part: str, begin: Timestamp, end: Timestamp) -> None:
        """Keep the time of one piece of work, by both clocks."""
        self._samples[f"{part}, wall"].append(end.wall - begin.wall)
        self._samples[f"{part}, CPU"].append(end.cpu - begin.cpu)

    def all_seconds(self) -> dict[str, tuple[float, ...]]:
        """Return the seconds of every sample, by part (compute, memory) and clock."""
        return {name: tuple(values) for name, values in self._samples.items()}

    def spread(self) -> float:
        """Return how uneven the machine's speed was: upper quartile over median of the compute wall times, minus 1."""
        walls = self._samples[f"{COMPUTE}, wall"]
        return statistics.quantiles(walls, n=4)[2] / statistics.median(walls) - 1 if len(walls) > 3 else 0.0
