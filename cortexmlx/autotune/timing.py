"""Times the candidates of a job in turns, within a budget of runs and seconds. Without mlx."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from cortexmlx.autotune.job import Candidate
from cortexmlx.system.machine import is_memory_refusal

ROUNDS = 5
"""Timed runs of a candidate. One run before them is not counted: it compiles, and fills caches."""

FEWEST_ROUNDS = 3
"""Rounds that are enough if the budget ends in between."""

HOPELESS = 3.0
"""A candidate that takes this many times as long as the fastest is timed no further after the first round."""


class BudgetSpent(Exception):
    """Raised when the timing budget leaves no room for another run."""


class TimingBudget:
    """Limits how long candidates are timed: to `seconds` from now, to `runs` runs, and until `has_waiting()` is true.

    A run cannot be interrupted. So none begins that would end too late if it took as long as the candidate's last run,
    or, for a candidate's first one, as the longest run so far. What preparing takes does not count, since a kernel that
    is compiled there is compiled once: an opening may take so much longer.
    """

    def __init__(
        self,
        seconds: float,
        runs: int,
        *,
        has_waiting: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._deadline = clock() + seconds
        self._runs = runs
        self._has_waiting = has_waiting
        self._longest_run = 0.0

    def run(self, candidate: Candidate, expected: float | None = None) -> float:
        """Run a candidate, and return how many seconds it took. `expected` is what its last run took.

        Raises BudgetSpent before the run, and whatever the candidate raises.
        """
        start_time = self._clock()
        predicted_seconds = self._longest_run if expected is None else expected
        if self._runs <= 0 or start_time + predicted_seconds > self._deadline or self._has_waiting():
            raise BudgetSpent
        self._runs -= 1
        compute = candidate.prepare()
        compute_start = self._clock()
        try:
            compute()
            return self._clock() - compute_start
        finally:
            self._longest_run = max(self._longest_run, self._clock() - compute_start)


@dataclass(frozen=True)
class Timing:
    """The result of timing a job's candidates: the seconds of each that works, and why the others do not."""

    seconds: dict[str, float]
    """The median of each candidate that serves, for computing the job once."""
    refused: dict[str, str]
    """Why the others do not."""
    passing: bool = False
    """Whether memory was refused to a candidate, which may serve next time."""


def time_candidates(candidates: Sequence[Candidate], budget: TimingBudget) -> Timing | None:
    """Time all candidates in turns. Return None if the budget ends before each was timed often enough."""
    refused: dict[str, str] = {}
    memory_refused = False
    times: dict[str, list[float]] = {}
    active_candidates: list[Candidate] = []

    def run_or_refuse(candidate: Candidate, expected: float | None) -> float | None:
        nonlocal memory_refused
        try:
            return budget.run(candidate, expected)
        except BudgetSpent:
            raise
        except Exception as error:  # whatever a kernel, a compiler or a library raises: it cannot serve
            refused[candidate.name] = _describe_error(error)
            memory_refused = memory_refused or is_memory_refusal(error)
            return None

    try:
        for candidate in candidates:
            if run_or_refuse(candidate, None) is not None:
                active_candidates.append(candidate)
                times[candidate.name] = []
        for number in range(ROUNDS):
            for candidate in active_candidates if number % 2 == 0 else active_candidates[::-1]:
                if candidate.name in refused:
                    continue
                last = times[candidate.name][-1] if times[candidate.name] else None
                seconds = run_or_refuse(candidate, last)
                if seconds is not None:
                    times[candidate.name].append(seconds)
            active_candidates = [candidate for candidate in active_candidates if candidate.name not in refused]
            if number == 0 and active_candidates:
                limit = HOPELESS * min(times[candidate.name][0] for candidate in active_candidates)
                active_candidates = [candidate for candidate in active_candidates if times[candidate.name][0] <= limit]
    except BudgetSpent:
        counts = [len(times[candidate.name]) for candidate in active_candidates if candidate.name not in refused]
        if len(times) + len(refused.keys() - times.keys()) < len(candidates) or min(counts, default=0) < FEWEST_ROUNDS:
            return None
    times_per_run = {candidate.name: candidate.times for candidate in candidates}
    return Timing(
        {name: median(t) / times_per_run[name] for name, t in times.items() if name not in refused},
        refused,
        memory_refused,
    )


def _describe_error(error: Exception) -> str:
    """Return an exception's type (unless CannotServe) and its message's first line, at most 300 characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = "" if type(error).__name__ == "CannotServe" else f"{type(error).__name__}: "
    return f"{kind}{first}"[:300] or type(error).__name__
