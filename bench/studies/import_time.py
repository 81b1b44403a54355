"""What `import cortexmlx` takes, beside a Python that imports nothing, in turns, each in a process of its own:

    python -m cortexmlx.bench.studies.import_time [PROGRAM ...]

CPU time counts, since another program's work is none of it; the best wall time is what an idle machine shows.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

PROGRAMS = ("import cortexmlx", "from cortexmlx import Engine", "import mlx.core")
"""What an app imports at its start, what its first use of the engine imports, and what MLX alone takes."""

TURNS = 15


@dataclass(frozen=True)
class Cost:
    """Milliseconds over those of a Python that imports nothing: CPU time in the median, and the least wall time."""

    program: str
    cpu: float
    wall: float


def measure(programs: tuple[str, ...] = PROGRAMS, turns: int = TURNS) -> list[Cost]:
    """The cost of each program, measured in turns with nothing. Raises CalledProcessError if one fails."""
    runs: dict[str, list[tuple[float, float]]] = {program: [] for program in ("pass", *programs)}
    for _ in range(turns):
        for program, taken in runs.items():
            taken.append(_run(program))
    cpu = {program: statistics.median(c for c, _ in taken) for program, taken in runs.items()}
    wall = {program: min(w for _, w in taken) for program, taken in runs.items()}
    return [Cost(p, 1e3 * (cpu[p] - cpu["pass"]), 1e3 * (wall[p] - wall["pass"])) for p in programs]


def _run(program: str) -> tuple[float, float]:
    """Seconds of CPU and of wall time that a process of its own takes."""
    before, began = _of_children(), time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return _of_children() - before, time.perf_counter() - began


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    for cost in measure(tuple(sys.argv[1:]) or PROGRAMS):
        print(f"{cost.program:32} {cost.cpu:7.0f} ms of CPU time, {cost.wall:7.0f} ms at best")
