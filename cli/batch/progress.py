"""The progress of a batch: done of total, failed, running, waiting, tok/s, KV use, time left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortexmlx.cli.files.status_line import StatusLine
from cortexmlx.cli.terminal.text import duration
from cortexmlx.kv.sizing import format_bytes

if TYPE_CHECKING:
    from cortexmlx.cli.batch.run import BatchRun
    from cortexmlx.engine import Engine


class Progress(StatusLine):
    """A thread that shows `run` on stderr.

    - `before`: requests of the `total` that an earlier run finished. They count as done, but not for the time left.
    - `live`: False if the results go to stdout. On a terminal, no live line is then drawn over them.
    """

    def __init__(self, engine: Engine, run: BatchRun, *, total: int | None, live: bool, before: int = 0) -> None:
        super().__init__(self._line, live=live)
        self._engine = engine
        self._run = run
        self._before = before
        self._total = total

    def _line(self) -> str:
        stats, run = self._engine.stats(), self._run
        elapsed = run.seconds
        done = self._before + run.done
        running, waiting = stats.rows_running, stats.rows_waiting
        if self._total is not None:  # the engine knows a few requests at a time; the rest waits, too
            running = min(running, self._total - done)
            waiting = self._total - done - running
        parts = [
            f"{done}/{self._total} done" if self._total is not None else f"{done} done",
            *([f"{run.failed} failed"] if run.failed else []),
            f"{running} running",
            f"{waiting} waiting",
            f"{stats.generated_tokens / elapsed:.0f} tok/s",
            f"KV {format_bytes(stats.kv_bytes_in_use)} of {format_bytes(stats.kv_bytes_limit)}",
        ]
        answered = run.done - run.failed  # most errors come at once and say nothing about the others
        if self._total is not None and answered > 0:
            asked = max(self._total - done, 0)
            left = run.last / answered * asked - (elapsed - run.last)  # counts down until the next one is done
            parts.append(f"{duration(max(left, 0.0))} left")
        return " · ".join(parts)
