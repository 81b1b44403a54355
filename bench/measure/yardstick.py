"""How fast the machine itself is at the moment: fixed pieces of work that no change of this program affects.

Figures of today and of last week differ for two reasons. The program changed, or the machine was busier, hotter or on
battery. The yardstick is measured between the repetitions, and tells which.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

import mlx.core as mx

from cortexmlx.bench.measure.trace import Stamp

COMPUTE, MEMORY = "products", "memory"
"""Parts of the machine: matrix products, which limit a prompt, and reading memory, which limits a decode step."""

_SIZE, _PRODUCTS = 640, 4
_NUMBERS = 32 << 20
"""128 MiB of float32: more than caches hold, as weights are."""


class Yardstick:
    """Samples of both pieces of work, in seconds."""

    def __init__(self) -> None:
        self._square = mx.random.normal((_SIZE, _SIZE), key=mx.random.key(0)) / _SIZE
        self._column = mx.random.normal((_SIZE, 1), key=mx.random.key(1))
        self._wide = mx.ones((_NUMBERS // _SIZE, _SIZE))
        mx.eval(self._square, self._column, self._wide)
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._run()
        self._samples.clear()  # the first run is slow

    def sample(self) -> None:
        """Do both pieces of work once. It takes about a tenth of a second on two cores of a server."""
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
        """Bytes that the yardstick keeps in MLX's memory."""
        return self._square.nbytes + self._column.nbytes + self._wide.nbytes

    @property
    def samples(self) -> int:
        """The number of samples so far."""
        return len(self._samples[f"{COMPUTE}, wall"])

    def beside(self, before: int) -> dict[str, float]:
        """Return seconds around a piece of work, by part and clock.

        This is the geometric mean of sample number `before`, just before the work, and of the next sample if there is
        one.
        """
        around = {name: values[before : before + 2] for name, values in self._samples.items()}
        return {name: statistics.geometric_mean(values) for name, values in around.items()}

    def _note(self, part: str, begin: Stamp, end: Stamp) -> None:
        self._samples[f"{part}, wall"].append(end.wall - begin.wall)
        self._samples[f"{part}, CPU"].append(end.cpu - begin.cpu)

    def seconds(self) -> dict[str, tuple[float, ...]]:
        """Return every sample in seconds, by part and clock."""
        return {name: tuple(values) for name, values in self._samples.items()}

    def spread(self) -> float:
        """Return how uneven the machine was: the upper quartile of the products' wall times over their median,
        minus 1.
        """
        walls = self._samples[f"{COMPUTE}, wall"]
        return statistics.quantiles(walls, n=4)[2] / statistics.median(walls) - 1 if len(walls) > 3 else 0.0
