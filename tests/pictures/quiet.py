"""Whether the machine is quiet: pictures have figures in them, and those of a busy machine mislead."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cortexmlx.cpu import blas

SAMPLES = 20
SIZE, PRODUCTS = 640, 4
"""Of the matrices that are multiplied in a sample, and how often."""
MIN_SHARE = 0.9
"""Of its CPU's time, what a program gets that runs alone on it; the rest is the system's."""

MAX_SPREAD = 0.15
"""How much longer than the median the slowest quarter of equal pieces of work may take."""


@dataclass(frozen=True)
class Look:
    """What one CPU's yardstick found: seconds of wall and of CPU time of equal pieces of work."""

    wall: Sequence[float]
    cpu: Sequence[float]

    @property
    def share(self) -> float:
        """The share of the time that it was computing, of 1."""
        return sum(self.cpu) / sum(self.wall)

    @property
    def spread(self) -> float:
        """The slowest quarter over the median, less 1."""
        return statistics.quantiles(self.wall, n=4)[2] / statistics.median(self.wall) - 1


def busy(looks: Sequence[Look]) -> str | None:
    """What keeps the machine busy, with the figures and what to do; None if it is quiet."""
    share, spread = min(look.share for look in looks), max(look.spread for look in looks)
    found = []
    if share < MIN_SHARE:
        found.append(f"the yardstick gets {share:.0%} of a CPU, where a quiet machine gives {MIN_SHARE:.0%} or more")
    if spread > MAX_SPREAD:
        found.append(
            f"its slowest quarter takes {spread:.0%} longer than the median, where a quiet machine stays below "
            f"{MAX_SPREAD:.0%}"
        )
    if not found:
        return None
    return f"the machine is busy: {', and '.join(found)}. End what else runs, wait a minute, and try again"


def look() -> list[Look]:
    """A yardstick on each CPU, all at the same time, for about two seconds."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.pictures.quiet"]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(blas.usable_cpus())
    ]
    found = [one.communicate()[0] for one in running]
    return [Look(*json.loads(text)) for text in found]


def main() -> None:
    """One yardstick: print the seconds of its samples, by the wall's clock and by the CPU's."""
    blas.preload()
    import mlx.core as mx

    square = mx.random.normal((SIZE, SIZE), key=mx.random.key(0)) / SIZE
    walls, cpus = list[float](), list[float]()
    for _ in range(1 + SAMPLES):
        wall, cpu, product = time.perf_counter(), time.process_time(), square
        for _ in range(PRODUCTS):
            product = product @ square
        mx.eval(product)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    print(json.dumps([walls[1:], cpus[1:]]))  # the first one is slow


if __name__ == "__main__":
    main()
