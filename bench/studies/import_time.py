"""Measures the time of `import cortexmlx`, beyond that of a Python that imports nothing:

python -m cortexmlx.bench.studies.import_time [PROGRAM ...]

The programs take turns, each in its own process. CPU time is the figure that counts, because it excludes the work of
other programs. The best wall time is the time on an idle machine.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

PROGRAMS = ("import cortexmlx", "from cortexmlx import Engine", "import mlx.core")
"""What an app imports at its start, what its first use of the engine imports, and MLX alone."""

TURNS = 15


@dataclass(frozen=True)
class ImportCost:
    """Milliseconds that a program of imports takes longer than a Python that imports nothing."""

    program: str
    cpu: float
    """The median CPU time."""
    wall: float
    """The shortest wall time."""


def measure_imports(programs: tuple[str, ...] = PROGRAMS, turns: int = TURNS) -> list[ImportCost]:
    """Return the cost of each import program, in turns with an empty one. Raises CalledProcessError if one fails."""
    runs: dict[str, list[tuple[float, float]]] = {program: [] for program in ("pass", *programs)}
    for _ in range(turns):
        for program, times in runs.items():
            times.append(_time_program(program))
    cpu = {program: statistics.median(c for c, _ in taken) for program, taken in runs.items()}
    wall = {program: min(w for _, w in taken) for program, taken in runs.items()}
    return [ImportCost(p, 1e3 * (cpu[p] - cpu["pass"]), 1e3 * (wall[p] - wall["pass"])) for p in programs]


def _time_program(program: str) -> tuple[float, float]:
    """Return the seconds of CPU time and of wall time that `program` takes in its own process."""
    cpu_before, start_time = _children_cpu_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return _children_cpu_seconds() - cpu_before, time.perf_counter() - start_time


def _children_cpu_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    for cost in measure_imports(tuple(sys.argv[1:]) or PROGRAMS):
        print(f"{cost.program:32} {cost.cpu:7.0f} ms of CPU time, {cost.wall:7.0f} ms at best")
