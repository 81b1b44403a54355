"""The command `mlx.launch`, with a wait that lets other processes work. Run as a file: `python -P mlx_launch.py ...`.

MLX's launcher waits until it can read what a worker writes, or write to it. A worker's input can nearly always be
written to, so each of its threads would never rest, and take a core from the workers. Here it waits for output alone.
It is a process of its own; nothing is changed in the controller's.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

LONGEST_SECONDS = 0.1
"""The longest wait: input for the workers, such as the group's key, may be there."""


def select_without_write_wakeups(
    reads: Sequence[int], writes: Sequence[int], errors: Sequence[int], timeout: float
) -> tuple[list[int], list[int], list[int]]:
    """Do what `select.select` does, but wait for readable files only, and at most `LONGEST_SECONDS`."""
    readable, _, failed = select.select(reads, [], errors, min(timeout, LONGEST_SECONDS))
    return readable, select.select([], writes, [], 0)[1], failed


def log_rank_exits(log: Callable[..., None]) -> Callable[..., None]:
    """Wrap the launcher's `log` so that it reports every rank that exits, even with code 0 and without `--verbose`.
    `mlx.launch` goes on after such an exit, so nobody would know that a worker which is awaited has ended.
    """

    def log_with_exits(verbose: bool, *values: object, **options: Any) -> None:
        log(verbose or str(values[0]).startswith("Node with rank"), *values, **options)

    return log_with_exits


def main() -> int | None:
    """Run `mlx.launch` with this process's arguments."""
    (command,) = entry_points(group="console_scripts", name="mlx.launch")
    launch = command.load()
    names = sys.modules[launch.__module__].__dict__
    names["select"] = select_without_write_wakeups
    names["log"] = log_rank_exits(names["log"])
    result: int | None = launch()
    return result


if __name__ == "__main__":
    sys.exit(main())
