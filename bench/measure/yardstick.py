"""How fast the machine itself is just now: fixed pieces of work that no change of this program touches.

A figure of today and one of last week differ for two reasons: the program changed, or the machine was busier, hotter or
on its battery. The yardstick is measured between the repetitions, and says which.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

import mlx.core as mx

from cortexmlx.bench.measure.trace import Stamp

COMPUTE, MEMORY = "products", "memory"
"""Parts of the machine: matrix products, which bound a prompt, and reading memory, which bounds a decode step."""

_SIZE, _PRODUCTS = 640, 4
_NUMBERS = 32 << 20
"""128 MiB: more than caches hold, as weights are."""


class Yardstick:
    """Samples of both pieces of work, in seconds."""

    def __init__(self) -> None:
        self._square = mx.random.normal((_SIZE, _SIZE), key=mx.random.key(0)) / _SIZE
        self._column = mx.random.normal((_SIZE, 1), key=mx.random.key(1))
        self._wide = mx.ones((_NUMBERS // _SIZE, _SIZE))
        mx.eval(self._square, self._column, self._wide)
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._run()
        self._samples.clear()  # the first is slow

    def sample(self) -> None:
        """Do both once. About a tenth of a second on two cores of a server."""
        self._run()

    def _run(self) -> None:
        begin = Stamp.now()
        product = self._square
        for _ in range(_PRODUCTS):
            product = product @ self._square
        mx.eval(product)
        middle = Stamp.now()
        mx.eval(self._wide @ self._column)
        self._note(COMPUTE, begin, middle)
        self._note(MEMORY, middle, Stamp.now())

    @property
    def bytes(self) -> int:
        """What it keeps in MLX's memory."""
        return self._square.nbytes + self._column.nbytes + self._wide.nbytes

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self._samples[f"{COMPUTE}, wall"])

    def beside(self, before: int) -> dict[str, float]:
        """Seconds around a piece of work, by part and clock: the geometric mean of sample number `before`, which came
        just before it, and of the next one, if there is one.
        """
        around = {name: values[before : before + 2] for name, values in self._samples.items()}
        return {name: statistics.geometric_mean(values) for name, values in around.items()}

    def _note(self, part: str, begin: Stamp, end: Stamp) -> None:
        self._samples[f"{part}, wall"].append(end.wall - begin.wall)
        self._samples[f"{part}, CPU"].append(end.cpu - begin.cpu)

    def seconds(self) -> dict[str, tuple[float, ...]]:
        """Every sample, by part and clock."""
        return {name: tuple(values) for name, values in self._samples.items()}

    def spread(self) -> float:
        """How uneven the machine was: the slowest quarter over the median, less 1, of its wall times."""
        walls = self._samples[f"{COMPUTE}, wall"]
        return statistics.quantiles(walls, n=4)[2] / statistics.median(walls) - 1 if len(walls) > 3 else 0.0
