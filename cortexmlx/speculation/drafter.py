"""Drafter: whoever guesses the next tokens of rows. Without mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cortexmlx.scheduling.job import Job, JobId


@dataclass(frozen=True)
class Draft:
    """Guessed next tokens of a row."""

    tokens: Sequence[int]
    """They follow `job.tokens`, so the first of them may be in flight."""
    likeness: int = 0
    """Drafts of one drafter that have the same number are about equally often right."""
    certain: bool = False
    """Whether no other tokens can be chosen there."""


class Drafter(Protocol):
    """Guesses the next tokens of rows. It never changes a job."""

    name: str
    """How `stats()` calls it."""

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[Draft | None]:
        """Return a draft of at most `budget` tokens for each of the `jobs`, which decode; None where there is no
        guess.
        """

    def end(self, job: Job) -> None:
        """Note that a job has ended. Its tokens may be remembered for others of the same `salt`."""

    def forget(self) -> None:
        """Forget all texts, because the engine begins anew."""


class SlowDrafter(Drafter, Protocol):
    """A drafter whose guesses take the engine's time, so that it is asked only if that pays: a model."""

    @property
    def wants_drained(self) -> bool:
        """Whether `propose` must know the newest token of each row, so that nothing may be in flight before it. False
        if it has no guesses now.
        """

    def seconds_for(self, rows: int, tokens: int) -> float | None:
        """Return about how long it takes to guess `tokens` tokens for each of `rows` rows; None if that is not
        known.
        """


# ForcedDrafter: the tokens that a grammar forces, which are never wrong.


class ForcedDrafter:
    """Drafts what must come next in the jobs that it follows: those with a grammar."""

    name = "forced"

    def __init__(self) -> None:
        self._forced: dict[JobId, Callable[[], Sequence[int]]] = {}

    def follow(self, job: JobId, forced: Callable[[], Sequence[int]]) -> None:
        """Draft the tokens of a job until it ends. `forced()` returns those that must come next; often there are
        none.
        """
        self._forced[job] = forced

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[Draft | None]:
        """See `Drafter`."""
        runs = [self._forced[job.id]()[:budget] if job.id in self._forced else () for job in jobs]
        return [Draft(run, certain=True) if run else None for run in runs]

    def end(self, job: Job) -> None:
        """See `Drafter`."""
        self._forced.pop(job.id, None)

    def forget(self) -> None:
        """See `Drafter`."""
        self._forced.clear()
