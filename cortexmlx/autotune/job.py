"""TuningJob: a computation that several candidates can do. Candidate: one of them. Without mlx."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cortexmlx.errors import CortexError


class CannotServe(CortexError):
    """Raised by a candidate that cannot compute a job. The message says why."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute a job, such as our kernel or MLX's."""

    name: str
    """Names it in tables, on disk too."""
    prepare: Callable[[], Callable[[], object]]
    """Return a function that computes the job and waits for the result. Only this function's time counts: what the
    host can do ahead belongs to `prepare`. Both may raise `CannotServe`. Any other exception means the same.
    """
    times: int = 1
    """How many times that function computes the job. Several times hide what it costs to begin and to wait."""


@dataclass(frozen=True)
class TuningJob:
    """A computation to autotune, for one class of batches, with its candidates.

    A job is cheap to make. Its candidates allocate nothing before `prepare`.
    """

    key: str
    """Names the job on disk: all that decides which candidate is the fastest."""
    label: str
    """The job in a line of a table, without its class."""
    batch: str
    """The class of rows and lengths in a line of a table."""
    candidates: tuple[Candidate, ...]
    """The candidates. The first one serves while nothing is timed."""

    @property
    def default_candidate(self) -> str:
        """The name of the candidate that is used while nothing is timed."""
        return self.candidates[0].name

    @property
    def candidate_names(self) -> frozenset[str]:
        """The names of all candidates."""
        return frozenset(candidate.name for candidate in self.candidates)
