"""Speculation: drafts tokens for rows before a step is planned, if that is faster than decoding. Without mlx.

Every guess is compared with the tokens that come, also if it is not drafted. So it is known how often guesses are right
before one of them costs anything, and texts that do not repeat themselves are never slowed down to find that out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cortexmlx.scheduling.drafts import MOST_DRAFTS
from cortexmlx.scheduling.job import Job, JobId
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.scheduling.steps.plan import StepPlan
from cortexmlx.speculation.chances import Chances, Source
from cortexmlx.speculation.drafter import Draft, Drafter
from cortexmlx.speculation.lengths import choose
from cortexmlx.speculation.time_ledger import TimeLedger

MOST_OF_ALL = 64
"""How many drafted tokens of all rows a step verifies at most."""

ENOUGH = MOST_DRAFTS // 2
"""A guess that has fewer tokens left is asked for again."""

BEGIN, GO_ON = 0.10, 0.02
"""By which part of a step's time verifying must be faster than decoding, to begin and to go on with it."""


@dataclass
class DraftCounts:
    """How many tokens a drafter has drafted, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class StepCounts:
    """Steps that verified drafts, the rows in them that got tokens, and how many tokens these got."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0


@dataclass
class _Guess:
    """Guessed tokens of a row, whose answer had `at` tokens then. `judged` of them have come since, and were right."""

    drafter: Drafter
    draft: Draft
    at: int
    judged: int = 0

    @property
    def source(self) -> Source:
        """Whose guess it is."""
        return self.drafter.name, self.draft.likeness

    @property
    def left(self) -> Sequence[int]:
        """The tokens that have not come yet."""
        return self.draft.tokens[self.judged :]


class Speculation:
    """Asks the `drafters`, in order, for the next tokens of a scheduler's rows; the first that has a guess is heard.

    What steps cost, and how much drafting may still lose, is in `ledger`. `counts` are by drafter.
    """

    def __init__(
        self, scheduler: Scheduler, drafters: Sequence[Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.counts: Mapping[str, DraftCounts] = {drafter.name: DraftCounts() for drafter in drafters}
        self.steps = StepCounts()
        self.ledger = TimeLedger(scheduler)
        self.chances = Chances()
        self._scheduler = scheduler
        self._drafters = drafters
        self._clock = clock
        self._guesses: dict[JobId, _Guess] = {}
        self._drafted: dict[JobId, tuple[Job, Drafter]] = {}

    # -- before a step ------------------------------------------------------------------------------------------------

    def draft(self) -> None:
        """Draft tokens of rows, if that is worth it. Call it before a step is planned."""
        if not self._drafters or any(job.verifying for job, _ in self._drafted.values()):
            return
        jobs = [job for job in self._scheduler.draftable if not job.drafts or job.id in self._drafted]
        self._drafted.clear()
        if not jobs:
            return
        pending = any(job.num_planned_outputs > job.generated for job in jobs)
        prices = self.ledger.prices(len(jobs), MOST_OF_ALL, pending)
        lengths = None
        if prices is not None and prices.can_pay:
            self._ask(jobs)
            margin = (BEGIN if pending else GO_ON) * prices.decode
            lengths = choose([self._chances(job) for job in jobs], prices.costs, prices.token, margin, prices.allows)
        else:
            self._guesses.clear()
        for job, length in zip(jobs, lengths or [0] * len(jobs), strict=True):
            if length:
                guess = self._guesses[job.id]
                self._scheduler.draft(job.id, guess.left[: _pending(job) + length])
                self._drafted[job.id] = job, guess.drafter
            elif job.drafts:
                self._scheduler.draft(job.id, ())
        if self._drafted:
            self.ledger.begin(pending)

    def _ask(self, jobs: Sequence[Job]) -> None:
        """Judge the guesses of rows by what has come, and ask for new ones where there are few tokens left."""
        asked = []
        for job in jobs:
            self._judge(job)
            guess = self._guesses.get(job.id)
            if guess is None or (len(guess.left) < ENOUGH and not guess.draft.certain):
                asked.append(job)
        for drafter in self._drafters:
            if not asked:
                return
            began = self._clock()
            drafts = drafter.propose(asked, MOST_DRAFTS + 1)
            self.ledger.asked(self._clock() - began)
            left = []
            for job, draft in zip(asked, drafts, strict=True):
                if draft is None or not draft.tokens:
                    left.append(job)
                else:
                    self._guesses[job.id] = _Guess(drafter, draft, job.generated)
            asked = left
        for job in asked:
            if job.id not in self._guesses:
                self.chances.no_guess(job.id)

    def _judge(self, job: Job) -> None:
        """Compare a row's guess with the tokens that have come since. Drop it if one was wrong, or if all have come."""
        guess = self._guesses.get(job.id)
        if guess is None:
            return
        new, tokens = job.generated - guess.at, guess.draft.tokens
        for place in range(guess.judged, min(new, len(tokens))):
            right = job.tokens[place - new] == tokens[place]
            if not guess.draft.certain:
                self.chances.note(job.id, guess.source, right)
            if not right:
                del self._guesses[job.id]
                return
        guess.judged = new
        if new >= len(tokens):
            del self._guesses[job.id]

    def _chances(self, job: Job) -> list[float]:
        """Return how likely a row's guessed tokens after those in flight are right, as far as they can be computed."""
        guess = self._guesses.get(job.id)
        if guess is None:
            return []
        pending = _pending(job)
        tokens = min(len(guess.left), MOST_DRAFTS, pending + job.plannable - 1)
        if guess.draft.certain:
            return [1.0] * (tokens - pending)
        return self.chances.of(job.id, guess.source, tokens)[pending:]

    # -- after a step -------------------------------------------------------------------------------------------------

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step whose results were taken. `seconds` is the time that it took of the engine's: since the
        step before was taken, or since it was begun if there was none.
        """
        accepted = 0
        while self._scheduler.verified:
            verified = self._scheduler.verified.pop()
            accepted += verified.accepted
            if verified.job.id in self._drafted:
                counts = self.counts[self._drafted.pop(verified.job.id)[1].name]
                counts.drafted += verified.drafted
                counts.accepted += verified.accepted
        step = self.ledger.took(plan, seconds, accepted)
        if step.drafted:
            self.steps.steps += 1
            self.steps.rows += step.rows
            self.steps.tokens += step.rows + accepted

    def end(self, job: Job) -> None:
        """Note that a job has ended."""
        self._drafted.pop(job.id, None)
        self._guesses.pop(job.id, None)
        self.chances.end(job.id)
        for drafter in self._drafters:
            drafter.end(job)

    def forget(self) -> None:
        """Forget all texts, because the engine begins anew."""
        self._drafted.clear()
        self._guesses.clear()
        for drafter in self._drafters:
            drafter.forget()


def _pending(job: Job) -> int:
    """Return how many tokens of a row are in flight."""
    return job.num_planned_outputs - job.generated
