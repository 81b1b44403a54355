"""Drafters: they guess the next tokens of rows, for speculative decoding. Without mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cortexmlx.scheduling.job import Job, JobId


@dataclass(frozen=True)
class TokenDraft:
    """The guessed next tokens of a row."""

    tokens: Sequence[int]
    """They follow `job.tokens`, so the first of them may be in flight."""
    likeness: int = 0
    """Drafts of one drafter that have the same number are about equally often right."""
    certain: bool = False
    """Whether no other tokens can be chosen there."""


class Drafter(Protocol):
    """Guesses the next tokens of rows, for speculative decoding. It never changes a job."""

    name: str
    """How `stats()` calls it."""

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[TokenDraft | None]:
        """Return a draft of at most `budget` tokens for each of the decoding `jobs`; None where there is no guess."""

    def end(self, job: Job) -> None:
        """Note that a job has ended. Its tokens may be kept, to draft for others of the same `salt`."""

    def forget(self) -> None:
        """Forget the texts of all jobs, because the engine starts anew."""


class SlowDrafter(Drafter, Protocol):
    """A drafter whose guesses take the engine's time, such as a draft model. It is asked only if that pays."""

    @property
    def needs_drained_pipeline(self) -> bool:
        """Whether `propose` needs each row's newest token: no step may be in flight. False while it has no guesses."""

    def estimate_seconds(self, rows: int, tokens: int) -> float | None:
        """Return about how long it takes to guess `tokens` tokens for each of `rows` rows; None if that is unknown."""


# ForcedDrafter: the tokens that a grammar forces, which are never wrong.


class ForcedDrafter:
    """Drafts the tokens that a job's grammar forces, which are never wrong."""

    name = "forced"

    def __init__(self) -> None:
        self._forced_token_sources: dict[JobId, Callable[[], Sequence[int]]] = {}

    def add_job(self, job: JobId, get_forced_tokens: Callable[[], Sequence[int]]) -> None:
        """Draft a job's tokens until it ends. `get_forced_tokens()` returns those its grammar forces next, if any."""
        self._forced_token_sources[job] = get_forced_tokens

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[TokenDraft | None]:
        """Return the tokens that the grammar of each job forces next, at most `budget`; None where there are none."""
        runs = [
            self._forced_token_sources[job.id]()[:budget] if job.id in self._forced_token_sources else ()
            for job in jobs
        ]
        return [TokenDraft(run, certain=True) if run else None for run in runs]

    def end(self, job: Job) -> None:
        """Stop drafting for a job that has ended."""
        self._forced_token_sources.pop(job.id, None)

    def forget(self) -> None:
        """Stop drafting for all jobs, because the engine starts anew."""
        self._forced_token_sources.clear()
