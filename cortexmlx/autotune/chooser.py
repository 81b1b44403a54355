"""Chooser: which candidate serves each job. Without mlx."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from cortexmlx.autotune.job import Job
from cortexmlx.autotune.table import ChoiceTable, Entry
from cortexmlx.autotune.timing import Budget, Timing, measure
from cortexmlx.stats import ChoiceSource, TimedChoice

_log = logging.getLogger(__name__)

SECONDS = 1.5
"""How much later an engine may open because candidates are timed."""

RUNS = 2000
"""Runs of candidates at one opening."""

MARGIN = 0.05
"""The usual candidate serves unless another is faster by this share: times of one candidate differ by as much, and a
choice should be the same next time.
"""


class Chooser:
    """The choices of an engine. A `table` keeps the times for the next one; None keeps nothing."""

    def __init__(self, table: ChoiceTable | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._table = table
        self._clock = clock
        self._choices: dict[str, TimedChoice] = {}

    def decide(
        self,
        jobs: Iterable[Job],
        *,
        seconds: float = SECONDS,
        runs: int = RUNS,
        again: bool = False,
        waiting: Callable[[], bool] = lambda: False,
    ) -> None:
        """Choose a candidate for each job: from the table, or else by timing, in the order of the jobs.

        Timing ends after `seconds` or `runs` runs, and as soon as somebody is `waiting`. Jobs that are left get their
        usual candidate, and are timed next time. With `again`, nothing is taken from the table. Times are not kept if
        memory was refused to a candidate: on disk, that would last.
        """
        known = {} if again or self._table is None else self._table.read()
        fresh: dict[str, Entry] = {}
        budget = Budget(seconds, runs, waiting=waiting, clock=self._clock)
        try:
            for job in jobs:
                entry = known.get(job.key)
                if entry is not None and entry.timing.seconds.keys() | entry.timing.refused.keys() == job.names:
                    self._take(job, ChoiceSource.DISK, entry.timing)
                    continue
                timing = measure(job.candidates, budget) if len(job.candidates) > 1 else None
                if timing is None or not timing.seconds:
                    self._take(job, ChoiceSource.RULE, timing or Timing({}, {}))
                    continue
                self._take(job, ChoiceSource.TIMED, timing)
                if not timing.passing:
                    fresh[job.key] = Entry(job.label, job.batch, job.usual, timing)
        finally:
            if fresh and self._table is not None:
                self._table.add(fresh)

    def fix(self, job: Job) -> None:
        """Let the usual candidate of a job serve, whatever is the fastest."""
        self._take(job, ChoiceSource.FIXED, Timing({}, {}))

    def chosen(self, key: str) -> str | None:
        """Return the name of the candidate that serves a job; None for a job that was not decided."""
        choice = self._choices.get(key)
        return None if choice is None else choice.chosen

    def choices(self) -> tuple[TimedChoice, ...]:
        """Return all choices, in the order in which they were made."""
        return tuple(self._choices.values())

    def _take(self, job: Job, source: ChoiceSource, timing: Timing) -> None:
        name = fastest(timing, job.usual)
        if name != job.usual:
            _log.info("%s, %s: %s serves instead of %s", job.label, job.batch, name, job.usual)
        self._choices[job.key] = TimedChoice(job.label, job.batch, name, source, timing.seconds, timing.refused)


def kept(table: ChoiceTable) -> tuple[TimedChoice, ...]:
    """Return the choices that follow from the times in a table."""
    return tuple(
        TimedChoice(e.label, e.batch, fastest(e.timing, e.usual), ChoiceSource.DISK, e.timing.seconds, e.timing.refused)
        for e in table.read().values()
    )


def fastest(timing: Timing, usual: str) -> str:
    """Return the name of the candidate that serves: the usual one, unless it is refused or another is faster by
    `MARGIN`.
    """
    if not timing.seconds:
        return usual
    name = min(timing.seconds, key=timing.seconds.__getitem__)
    least = timing.seconds[name]
    return usual if timing.seconds.get(usual, float("inf")) <= least * (1 + MARGIN) else name
