"""Drafter: whoever guesses the next tokens of rows. Without mlx."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cortexmlx.scheduling.job import Job


@dataclass(frozen=True)
class Draft:
    """Guessed next tokens of a row."""

    tokens: Sequence[int]
    """They follow `job.tokens`, so the first of them may be in flight."""
    likeness: int = 0
    """Drafts of one drafter that have the same number are about equally often right."""


class Drafter(Protocol):
    """Guesses the next tokens of rows. It never changes a job."""

    name: str
    """How `stats()` calls it."""

    @property
    def wants_drained(self) -> bool:
        """Whether `propose` must know the newest token of each row, so that nothing may be in flight before it."""

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[Draft | None]:
        """Return a draft of at most `budget` tokens for each of the `jobs`, which decode; None where there is no
        guess.
        """

    def end(self, job: Job) -> None:
        """Note that a job has ended. Its tokens may be remembered for others of the same `salt`."""

    def forget(self) -> None:
        """Forget all texts, because the engine begins anew."""
