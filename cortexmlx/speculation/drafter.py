"""Drafters: they guess the next tokens of rows, for speculative decoding. Without mlx."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cortexmlx.kv.step import GroupStep
from cortexmlx.scheduling.job import Job, JobId

log = logging.getLogger("cortexmlx")


@dataclass(frozen=True)
class TokenDraft:
    """The guessed next tokens of a row."""

    tokens: Sequence[int]
    """They follow `job.tokens`, so the first of them may be in flight."""
    confidence_class: int = 0
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
    """A drafter that takes the engine's time, such as a draft model. It is asked only if its guesses are worth it."""

    @property
    def needs_drained_pipeline(self) -> bool:
        """Whether `propose` may only be called while no step is in flight. False while it would guess nothing."""

    @property
    def max_tokens(self) -> int:
        """How many tokens of a row it guesses at most."""

    def estimate_seconds(self, rows: int, tokens: int) -> float | None:
        """Return about how long it takes to guess `tokens` tokens for each of `rows` rows; None if that is unknown."""


class MeanTimes:
    """Running means of measured times by number of rows. Numbers of equal bit length, such as 4 to 7, share a mean."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Move the mean of this number of rows towards a new measurement."""
        mean = self._means.get(rows.bit_length())
        self._means[rows.bit_length()] = seconds if mean is None else mean + _FORGETTING * (seconds - mean)

    def estimate(self, rows: int) -> float | None:
        """Return the mean time of `rows` rows, or of the nearest number that was measured; None if none was."""
        size = rows.bit_length()
        return self._means[min(self._means, key=lambda known: abs(known - size))] if self._means else None


class GuessTimes:
    """How long a slow drafter takes: for the first token of each row, and for each token after it."""

    def __init__(self) -> None:
        self.first = MeanTimes()
        self.further = MeanTimes()

    def estimate(self, rows: int, tokens: int) -> float | None:
        """Return about how long `tokens` tokens for each of `rows` rows take; None if that is unknown."""
        further = self.further.estimate(rows)
        first = self.first.estimate(rows) or further
        return None if first is None else first + (tokens - 1) * (further or first)


_FORGETTING = 0.2
"""Weight of the newest measurement in the running means."""


# ForcedDrafter: the tokens that a grammar forces, which are never wrong.


class ForcedDrafter:
    """Drafts the tokens that a job's grammar forces, which are never wrong."""

    name = "forced"

    def __init__(self) -> None:
        self._forced_token_sources: dict[JobId, Callable[[], Sequence[int]]] = {}

    @property
    def has_jobs(self) -> bool:
        """Whether any job has a grammar."""
        return bool(self._forced_token_sources)

    def add_job(self, job: JobId, get_forced_tokens: Callable[[], Sequence[int]]) -> None:
        """Have a job's forced tokens drafted from now on, until it ends. `get_forced_tokens()` returns those its
        grammar forces next, if any.
        """
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


# HeadDrafter: what the checkpoint's own draft head, or the model's assistant, finds likeliest.


HeadRow = tuple[JobId, int, int, int, int]
"""A row that is asked for: its job, the job's generation, the index before its newest token's, and that token; and how
much later than its index a token is rotated, after images.
"""


@dataclass(frozen=True)
class HeadQuery:
    """A query to a draft head or an assistant: the next `tokens` tokens of some rows."""

    rows: Sequence[HeadRow]
    tokens: int
    groups: Sequence[GroupStep] | None
    """Where the rows' keys and values are; None: where those of the newest step are, in whose tail some of them are."""


Propose = Callable[[HeadQuery], Sequence[Sequence[int]]]
"""Returns the likeliest next tokens of each row; none where they are not known."""

MAX_HEAD_TOKENS = 7
"""How many tokens of a row a draft head or an assistant guesses at most. They were trained for the first few."""

ENOUGH_DRAFTED, MISREAD = 500, 0.1
"""After so many drafts, a head with this share of right ones or less is switched off: it may be misread."""

PAUSE = 10.0
"""For how many seconds a head guesses nothing after it has failed."""


class HeadDrafter:
    """Drafts with the model's own draft head, which has run in the step before, or with its assistant.

    `name` is "head" or "assistant". `locate(jobs)` returns the `groups` of a `HeadQuery`.
    """

    max_tokens = MAX_HEAD_TOKENS

    def __init__(
        self,
        propose: Propose,
        locate: Callable[[Sequence[Job]], Sequence[GroupStep] | None],
        name: str = "head",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self._propose = propose
        self._locate = locate
        self._clock = clock
        self._times = GuessTimes()
        self._paused_until = -math.inf
        self.is_off = False

    @property
    def needs_drained_pipeline(self) -> bool:
        """Whether `propose` may only be called while no step is in flight. False while it pauses or is off."""
        return not self.is_off and self._clock() >= self._paused_until

    def propose(self, jobs: Sequence[Job], budget: int) -> Sequence[TokenDraft | None]:
        """Return up to `budget` tokens for each of the decoding `jobs`; None where it has not seen the newest token."""
        start_time = self._clock()
        rows = [(job.id, job.generation, len(job.tokens) - 2, job.tokens[-1], job.position_shift) for job in jobs]
        try:
            runs = self._propose(HeadQuery(rows, budget, self._locate(jobs)))
        except Exception as error:  # memory was refused, for example: an answer needs no guesses
            log.warning("the model's %s guesses nothing for %.0f seconds: %s", self._label, PAUSE, error)
            self._paused_until = self._clock() + PAUSE
            return [None] * len(jobs)
        self._record_time(len(jobs), max(map(len, runs), default=0), self._clock() - start_time)
        return [TokenDraft(tokens) if tokens else None for tokens in runs]

    @property
    def _label(self) -> str:
        """What log messages call the drafter."""
        return "draft head" if self.name == "head" else self.name

    def _record_time(self, rows: int, tokens: int, seconds: float) -> None:
        """Record how long it took to guess `tokens` tokens of each row. Tokens after the first may take longer."""
        if tokens > 1:
            first = self._times.first.estimate(rows)
            first = seconds / tokens if first is None else min(first, seconds)
            self._times.further.add(rows, (seconds - first) / (tokens - 1))
        else:
            self._times.first.add(rows, seconds)

    def estimate_seconds(self, rows: int, tokens: int) -> float | None:
        """Return about how long it takes to guess `tokens` tokens for each of `rows` rows; None if that is unknown."""
        return self._times.estimate(rows, tokens)

    def judge(self, drafted: int, accepted: int) -> None:
        """Switch the drafter off if hardly any of its drafts were right."""
        if not self.is_off and drafted >= ENOUGH_DRAFTED and accepted <= MISREAD * drafted:
            self.is_off = True
            log.warning(
                "%d of the %d tokens that the model's %s drafted were right: it is not used any more. It may be "
                "misread: please report it, with the model's name",
                accepted,
                drafted,
                self._label,
            )

    def end(self, job: Job) -> None:
        """Do nothing: nothing is kept of a job."""

    def forget(self) -> None:
        """Do nothing: nothing is kept of jobs."""
