"""Autotuner: chooses which candidate computes each job. Without mlx."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from cortexmlx.autotune.job import TuningJob
from cortexmlx.autotune.table import ChoiceTable, TimedJob
from cortexmlx.autotune.timing import Timing, TimingBudget, time_candidates
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


class Autotuner:
    """Chooses the fastest candidate for each job of an engine, by timing. A `table` keeps times for the next engine."""

    def __init__(self, table: ChoiceTable | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._table = table
        self._clock = clock
        self._choices: dict[str, TimedChoice] = {}

    def choose(
        self,
        jobs: Iterable[TuningJob],
        *,
        seconds: float = SECONDS,
        runs: int = RUNS,
        ignore_table: bool = False,
        has_waiting: Callable[[], bool] = lambda: False,
    ) -> None:
        """Choose a candidate for each job in order: from the table, or else by timing candidates, within `seconds` and
        `runs`.

        Timing ends after `seconds` or `runs` runs, and as soon as `has_waiting()` says that somebody waits. Jobs that
        are left get their usual candidate, and are timed next time. With `ignore_table`, nothing is taken from the
        table. Times are not kept if memory was refused to a candidate: on disk, that would last.
        """
        stored_entries = {} if ignore_table or self._table is None else self._table.read()
        new_entries: dict[str, TimedJob] = {}
        budget = TimingBudget(seconds, runs, has_waiting=has_waiting, clock=self._clock)
        try:
            for job in jobs:
                entry = stored_entries.get(job.key)
                if (
                    entry is not None
                    and entry.timing.seconds.keys() | entry.timing.refused.keys() == job.candidate_names
                ):
                    self._record_choice(job, ChoiceSource.DISK, entry.timing)
                    continue
                timing = time_candidates(job.candidates, budget) if len(job.candidates) > 1 else None
                if timing is None or not timing.seconds:
                    self._record_choice(job, ChoiceSource.RULE, timing or Timing({}, {}))
                    continue
                self._record_choice(job, ChoiceSource.TIMED, timing)
                if not timing.passing:
                    new_entries[job.key] = TimedJob(job.label, job.batch, job.default_candidate, timing)
        finally:
            if new_entries and self._table is not None:
                self._table.add(new_entries)

    def choose_default(self, job: TuningJob) -> None:
        """Choose the job's default candidate, even if another is faster."""
        self._record_choice(job, ChoiceSource.FIXED, Timing({}, {}))

    def chosen_candidate(self, key: str) -> str | None:
        """Return the name of the candidate that computes a job; None if none was chosen yet."""
        choice = self._choices.get(key)
        return None if choice is None else choice.chosen

    def choices(self) -> tuple[TimedChoice, ...]:
        """Return all choices made so far, in order."""
        return tuple(self._choices.values())

    def _record_choice(self, job: TuningJob, source: ChoiceSource, timing: Timing) -> None:
        """Pick the candidate that computes a job, and record it with the source of the choice."""
        name = pick_candidate(timing, job.default_candidate)
        if name != job.default_candidate:
            _log.info("%s, %s: %s serves instead of %s", job.label, job.batch, name, job.default_candidate)
        self._choices[job.key] = TimedChoice(job.label, job.batch, name, source, timing.seconds, timing.refused)


def read_choices(table: ChoiceTable) -> tuple[TimedChoice, ...]:
    """Return the choices that an autotuner would make from the times stored in a table."""
    return tuple(
        TimedChoice(
            e.label, e.batch, pick_candidate(e.timing, e.usual), ChoiceSource.DISK, e.timing.seconds, e.timing.refused
        )
        for e in table.read().values()
    )


def pick_candidate(timing: Timing, default_candidate: str) -> str:
    """Return the name of the candidate to use: the default, unless it is refused or another is faster by `MARGIN`."""
    if not timing.seconds:
        return default_candidate
    name = min(timing.seconds, key=timing.seconds.__getitem__)
    best_seconds = timing.seconds[name]
    return (
        default_candidate
        if timing.seconds.get(default_candidate, float("inf")) <= best_seconds * (1 + MARGIN)
        else name
    )
