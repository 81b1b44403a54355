"""The progress of a batch: a live line for a person, a line every ten seconds for a log."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.text import duration
from cortexmlx.errors import CortexError
from cortexmlx.kv.sizing import format_bytes

if TYPE_CHECKING:
    from cortexmlx.cli.batch.run import BatchRun
    from cortexmlx.engine import Engine

LIVE_SECONDS = 0.25
LOG_SECONDS = 10.0


class Progress:
    """A thread that shows `run` on stderr: done of total, failed, running, waiting, tok/s, KV use, time left.

    - `before`: requests of the `total` that an earlier run finished. They count as done, but not for the time left.
    - `live`: False if the results go to stdout. On a terminal, no live line is then drawn over them.
    """

    def __init__(self, engine: Engine, run: BatchRun, *, total: int | None, live: bool, before: int = 0) -> None:
        self._engine = engine
        self._run = run
        self._before = before
        self._total = total
        self._status: Any = None
        if console.is_terminal(sys.stderr) and (live or not sys.stdout.isatty()):
            from rich.status import Status

            self._status = Status("starting", console=console.stderr())
        self._every = LIVE_SECONDS if self._status else LOG_SECONDS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cortexmlx-progress", daemon=True)

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        if self._status:
            self._status.stop()

    def _watch(self) -> None:
        from rich.text import Text

        while not self._over.wait(self._every):
            try:
                line = self._line()
            except CortexError:  # the engine has ended; the run reports it
                return
            if self._status:
                self._status.update(Text(line))
            else:
                console.note(line)

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
