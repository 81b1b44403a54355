"""Candidates whose times are scripted, on a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cortexmlx.autotune.job import Candidate, TuningJob


@dataclass
class Clock:
    """A clock that stands still between runs, and the names of all runs so far."""

    now: float = 0.0
    runs: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def candidate(
        self,
        name: str,
        *seconds: float,
        first: float | None = None,
        ahead: float = 0.0,
        error: Exception | None = None,
        times: int = 1,
    ) -> Candidate:
        """A candidate that takes `seconds` in its runs (the last of them from then on), `first` seconds in the run that
        is not counted, and `ahead` seconds to prepare each. With an `error` it raises that in its first run.
        """
        script = iter([seconds[0] if first is None else first, *seconds])
        last = seconds[-1] if seconds else 0.0

        def prepare() -> Callable[[], None]:
            self.now += ahead

            def compute() -> None:
                self.runs.append(name)
                if error is not None:
                    raise error
                self.now += next(script, last)

            return compute

        return Candidate(name, prepare, times)


def job_of(candidates: Sequence[Candidate], key: str = "a job") -> TuningJob:
    """A job of these candidates."""
    return TuningJob(key, f"the label of {key}", "every batch", tuple(candidates))
