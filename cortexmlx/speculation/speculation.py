"""Speculative decoding: drafts tokens for rows before a step is planned, if that is faster than decoding. Without mlx.

Every guess is compared with the tokens that come, also if it is not drafted. So it is known how often guesses are right
before one of them costs anything, and texts that do not repeat themselves are never slowed down to find that out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cortexmlx.scheduling.drafts import MAX_DRAFTS
from cortexmlx.scheduling.job import Job, JobId, RowTokens
from cortexmlx.scheduling.plan import StepPlan
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.speculation.costs import StepPrices, TimeLedger
from cortexmlx.speculation.drafter import Drafter, ForcedDrafter, HeadDrafter, SlowDrafter, TokenDraft

MAX_STEP_DRAFTS = 64
"""How many drafted tokens of all rows a step verifies at most."""

ENOUGH_GUESSED = MAX_DRAFTS // 2
"""A guess that has fewer tokens left is asked for again."""

BEGIN, GO_ON = 0.10, 0.05
"""By which part of a step's time verifying must be faster than decoding, to begin and to go on with it."""

TRIAL_TOKENS = 4
"""For how many tokens of a row a slow drafter is asked that was not worth it before."""

SHORTEST_WAIT, LONGEST_WAIT = 16, 2048
"""After how many tokens such a drafter is asked again: the shortest after a time when asking was worth it, then twice
as many after each time when it was not, up to the longest.
"""

HEAD_WAKES = 16
"""So many tokens of each row before and after it is to be asked again, the model's draft head runs in all steps: a
window of steps on a CPU. Where it is one of few layers, that is what it costs most.
"""


@dataclass
class DraftCounts:
    """How many tokens a drafter has drafted, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class _Guess:
    """A row's guessed next tokens, from `start_length` answer tokens on; `num_confirmed` have come and were right."""

    drafter: Drafter
    draft: TokenDraft
    start_length: int
    num_confirmed: int = 0

    @property
    def source(self) -> DraftSource:
        """The drafter's name and the draft's confidence class: guesses of one source are about equally often right."""
        return self.drafter.name, self.draft.confidence_class

    @property
    def remaining(self) -> Sequence[int]:
        """The guessed tokens that have not come yet."""
        return self.draft.tokens[self.num_confirmed :]


class Speculation:
    """Decides before each step how many drafted tokens of which rows the step verifies. It asks the `drafters` in
    order, and takes the first guess. It asks the `slow_drafters` last, and only if they are expected to win more time
    than they take.

    What steps cost, and how much drafting may still lose, is in `ledger`. `counts` are by drafter.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        drafters: Sequence[Drafter],
        slow_drafters: Sequence[SlowDrafter] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._all_drafters = (*drafters, *slow_drafters)
        self.counts: Mapping[str, DraftCounts] = {drafter.name: DraftCounts() for drafter in self._all_drafters}
        self.ledger = TimeLedger(scheduler)
        self.acceptance_rates = AcceptanceRates()
        self.forced_drafter = next((drafter for drafter in drafters if isinstance(drafter, ForcedDrafter)), None)
        """Drafts the tokens that grammars force; None if this engine leaves that out."""
        self._scheduler = scheduler
        self._drafters = drafters
        self._guesses_freely = any(drafter is not self.forced_drafter for drafter in self._all_drafters)
        self._slow_drafters = slow_drafters
        self._head_drafter = next((drafter for drafter in slow_drafters if isinstance(drafter, HeadDrafter)), None)
        self._retry_waits = dict.fromkeys([drafter.name for drafter in slow_drafters], (0, SHORTEST_WAIT))
        self._clock = clock
        self._guesses: dict[JobId, _Guess] = {}
        self._passed_over: dict[JobId, _Guess] = {}
        self._drafted_jobs: dict[JobId, tuple[Job, Drafter]] = {}

    # -- before a step ------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        """Whether no token can be drafted, since only grammars give drafts, and no job has a grammar."""
        forces_tokens = self.forced_drafter is not None and self.forced_drafter.has_jobs
        return not (self._guesses_freely or self._drafted_jobs or forces_tokens)

    def draft(self) -> None:
        """Choose the drafts that the next step verifies, if faster than decoding. Call it before a step is planned."""
        if self._is_idle:
            return
        if any(job.drafts_in_flight and job.is_running for job, _ in self._drafted_jobs.values()):
            return
        jobs = self._scheduler.draftable_jobs
        if self._head_drafter is not None:
            asked_next, _ = self._retry_waits[self._head_drafter.name]
            is_awake = abs(self.ledger.tokens - asked_next) < HEAD_WAKES * max(1, len(jobs))
            can_pay = self.ledger.loss_budget.allows(0.5)
            self._scheduler.set_head_awake(is_awake and can_pay and not self._head_drafter.is_off)
        jobs = [job for job in jobs if not job.drafts or job.id in self._drafted_jobs]
        self._drafted_jobs.clear()
        if not jobs:
            return
        pending = any(job.num_planned_outputs > job.num_generated for job in jobs)
        prices = self.ledger.estimate_prices(len(jobs), MAX_STEP_DRAFTS, pending)
        lengths = None
        if prices is not None and prices.can_pay:
            self._update_guesses(jobs)
            if not pending:
                self._ask_slow_drafters(jobs, prices)
            margin = (BEGIN if pending else GO_ON) * prices.decode_time
            lengths = choose_draft_lengths(
                [self._guess_chances(job) for job in jobs],
                prices.verify_costs,
                prices.token_time,
                margin,
                prices.allows,
            )
        else:
            self._guesses.clear()
        for job, length in zip(jobs, lengths or [0] * len(jobs), strict=True):
            if length:
                guess = self._guesses[job.id]
                self._scheduler.set_drafts(job.id, guess.remaining[: _count_in_flight(job) + length])
                self._drafted_jobs[job.id] = job, guess.drafter
            elif job.drafts:
                self._scheduler.set_drafts(job.id, ())
        if self._drafted_jobs:
            self.ledger.begin_excursion(pending)

    def _update_guesses(self, jobs: Sequence[Job]) -> None:
        """Compare the rows' guesses with their new tokens. Ask for new guesses where few guessed tokens are left."""
        jobs_to_ask = []
        for job in jobs:
            self._check_guess(job)
            guess = self._guesses.get(job.id)
            if guess is None or (len(guess.remaining) < ENOUGH_GUESSED and not guess.draft.certain):
                jobs_to_ask.append(job)
        for drafter in self._drafters:
            if jobs_to_ask:
                jobs_to_ask = self._collect_guesses(drafter, jobs_to_ask, MAX_DRAFTS + 1)
        for job in jobs_to_ask:
            if job.id not in self._guesses:
                self.acceptance_rates.reset_streak(job.id)

    def _collect_guesses(self, drafter: Drafter, jobs: Sequence[Job], budget: int) -> list[Job]:
        """Ask a drafter for guesses. Keep each, unless another drafter's next token is likelier right. Return the jobs
        for which it has no guess.
        """
        start_time = self._clock()
        drafts = drafter.propose(jobs, budget)
        self.ledger.add_drafting_time(self._clock() - start_time)
        unguessed_jobs = []
        for job, draft in zip(jobs, drafts, strict=True):
            if draft is None or not draft.tokens:
                unguessed_jobs.append(job)
            else:
                guess, other = _Guess(drafter, draft, job.num_generated), self._guesses.get(job.id)
                if other is not None and other.drafter is not drafter:
                    if self._guess_chance(job, other) > self._guess_chance(job, guess):
                        guess, other = other, guess
                    if other.drafter is not self._head_drafter:
                        self._passed_over[job.id] = other
                self._guesses[job.id] = guess
        return unguessed_jobs

    @property
    def needs_drained_pipeline(self) -> bool:
        """Whether no step should be in flight when `draft` is called, since a slow drafter is to be asked then."""
        if not self._slow_drafters or not any(drafter.needs_drained_pipeline for drafter in self._slow_drafters):
            return False
        jobs = self._scheduler.draftable_jobs
        prices = self.ledger.estimate_prices(len(jobs), MAX_STEP_DRAFTS, pending=True) if jobs else None
        if prices is None or not prices.can_pay:
            return False
        return any(self._tokens_to_ask(each, self._rows_to_ask_for(each, jobs), prices) for each in self._slow_drafters)

    def _rows_to_ask_for(self, drafter: SlowDrafter, jobs: Sequence[Job]) -> list[Job]:
        """Return the rows that have no guess, or one whose next token is less likely right than this drafter's."""
        return [
            job
            for job in jobs
            if (guess := self._guesses.get(job.id)) is None
            or self._guess_chance(job, guess) < self._drafter_chances(drafter, job, 1)[0]
        ]

    def _drafter_chances(self, drafter: SlowDrafter, job: Job, tokens: int) -> list[float]:
        """Return the chances that the first 1, 2, .. `tokens` tokens that a slow drafter would guess are all right."""
        place = 0 if drafter is self._head_drafter else None
        return self.acceptance_rates.estimate(job.id, (drafter.name, 0), tokens, place)

    def _ask_slow_drafters(self, jobs: Sequence[Job], prices: StepPrices) -> None:
        """Ask the slow drafters for guesses of the rows where they may be better, of as many tokens as are worth their
        time. A drafter that is not worth it is tried again later, and more and more seldom.
        """
        for drafter in self._slow_drafters:
            rows = self._rows_to_ask_for(drafter, jobs)
            if tokens := self._tokens_to_ask(drafter, rows, prices):
                _, wait = self._retry_waits[drafter.name]
                best_length = self._best_draft_length(drafter, rows, prices)
                wait = SHORTEST_WAIT if best_length else min(2 * wait, LONGEST_WAIT)
                self._retry_waits[drafter.name] = self.ledger.tokens + wait, wait
                self._collect_guesses(drafter, rows, tokens)

    def _tokens_to_ask(self, drafter: SlowDrafter, jobs: Sequence[Job], prices: StepPrices) -> int:
        """Return for how many tokens of each job a slow drafter should be asked; 0 if it should not be."""
        if not jobs or not drafter.needs_drained_pipeline:
            return 0
        if best_length := self._best_draft_length(drafter, jobs, prices):
            return best_length
        is_due = self.ledger.tokens >= self._retry_waits[drafter.name][0]
        tokens = min(TRIAL_TOKENS, drafter.max_tokens)
        seconds = drafter.estimate_seconds(len(jobs), tokens) or 0.0
        cost = prices.verify_costs[tokens - 1] + self.ledger.to_units(seconds)
        return tokens if is_due and prices.allows(cost, 0.0) else 0

    def _best_draft_length(self, drafter: SlowDrafter, jobs: Sequence[Job], prices: StepPrices) -> int:
        """Return how many tokens of each job a slow drafter should guess for the greatest gain in time; 0 for no gain.
        The gain of the jobs' present guesses is subtracted.
        """
        best_length, best_gain = 0, GO_ON * prices.decode_time
        chances = [self._drafter_chances(drafter, job, MAX_DRAFTS) for job in jobs]
        expected_tokens = -sum(sum(self._guess_chances(job)) for job in jobs)
        for tokens in range(1, min(MAX_DRAFTS, drafter.max_tokens, len(prices.verify_costs) // len(jobs)) + 1):
            seconds = drafter.estimate_seconds(len(jobs), tokens)
            if seconds is None:
                return 0
            expected_tokens += sum(job_chances[tokens - 1] for job_chances in chances)
            cost = prices.verify_costs[tokens * len(jobs) - 1] + self.ledger.to_units(seconds)
            if expected_tokens * prices.token_time - cost > best_gain and prices.allows(cost, 0.0):
                best_length, best_gain = tokens, expected_tokens * prices.token_time - cost
        return best_length

    def _check_guess(self, job: Job) -> None:
        """Compare a row's guess with the tokens that have come since. Drop it if one was wrong, or if all have come.
        If another source's guess was set aside for it, compare its next token, too: its rate stays known.
        """
        passed_over = self._passed_over.get(job.id)
        if passed_over is not None:
            num_new = job.num_generated - passed_over.start_length - passed_over.num_confirmed
            if num_new > 0:
                del self._passed_over[job.id]
            if 0 < num_new <= len(job.tokens):
                is_right = job.tokens[-num_new] == passed_over.remaining[0]
                self.acceptance_rates.record(job.id, passed_over.source, is_right, keep_streak=True)
        guess = self._guesses.get(job.id)
        if guess is None:
            return
        num_new, tokens = job.num_generated - guess.start_length, guess.draft.tokens
        if num_new - guess.num_confirmed > len(job.tokens):  # it has dropped some of them
            del self._guesses[job.id]
            return
        for position in range(guess.num_confirmed, min(num_new, len(tokens))):
            is_right = job.tokens[position - num_new] == tokens[position]
            if not guess.draft.certain:
                place = position if guess.drafter is self._head_drafter else None
                self.acceptance_rates.record(job.id, guess.source, is_right, place)
            if not is_right:
                del self._guesses[job.id]
                return
        guess.num_confirmed = num_new
        if num_new >= len(tokens):
            del self._guesses[job.id]

    def _guess_chance(self, job: Job, guess: _Guess) -> float:
        """Return the chance that the next token of a guess is right."""
        if guess.draft.certain:
            return 1.0
        place = guess.num_confirmed if guess.drafter is self._head_drafter else None
        return self.acceptance_rates.estimate(job.id, guess.source, 1, place)[0]

    def _guess_chances(self, job: Job) -> list[float]:
        """Return the chances that the first 1, 2, .. tokens of a row's guess, after those in flight, are all right."""
        guess = self._guesses.get(job.id)
        if guess is None:
            return []
        pending = _count_in_flight(job)
        tokens = min(len(guess.remaining), MAX_DRAFTS, pending + job.num_plannable - 1)
        if guess.draft.certain:
            return [1.0] * (tokens - pending)
        place = guess.num_confirmed if guess.drafter is self._head_drafter else None
        return self.acceptance_rates.estimate(job.id, guess.source, tokens, place)[pending:]

    # -- after a step -------------------------------------------------------------------------------------------------

    def learn(self, plan: StepPlan, seconds: float, verified_rows: Sequence[RowTokens]) -> None:
        """Learn from a step after its results were collected, and from `verified_rows`, the rows whose drafts it
        verified. `seconds` is the time since the step before was collected, or, if there was none, since this one
        began.
        """
        if self._is_idle:
            return
        for row in verified_rows:
            if row.job.id in self._drafted_jobs:
                drafter = self._drafted_jobs.pop(row.job.id)[1]
                counts = self.counts[drafter.name]
                counts.drafted += row.num_drafted
                counts.accepted += row.num_accepted
                if drafter is self._head_drafter:
                    self._head_drafter.judge(counts.drafted, counts.accepted)
        self.ledger.record_step(plan, seconds, sum(row.num_accepted for row in verified_rows))

    def end(self, job: Job) -> None:
        """Forget an ended job, and tell the drafters. `learn`, perhaps later, counts what its last step verified."""
        self._guesses.pop(job.id, None)
        self._passed_over.pop(job.id, None)
        self.acceptance_rates.forget_row(job.id)
        for drafter in self._all_drafters:
            drafter.end(job)

    def forget(self) -> None:
        """Forget all texts and guesses, because the engine starts anew."""
        self._drafted_jobs.clear()
        self._guesses.clear()
        self._passed_over.clear()
        self.acceptance_rates.forget_rows()
        for drafter in self._all_drafters:
            drafter.forget()


def _count_in_flight(job: Job) -> int:
    """Return how many tokens of a row are in flight."""
    return job.num_planned_outputs - job.num_generated


# How many drafted tokens of which rows a step verifies: those whose gain is greatest.


def choose_draft_lengths(
    chances: Sequence[Sequence[float]],
    verify_costs: Sequence[float],
    token_time: float,
    margin: float,
    is_allowed: Callable[[float, float], bool],
) -> list[int] | None:
    """Return how many drafted tokens of each row to verify; None if no number is worth it.

    `chances[row][j]` is how likely the first j + 1 drafted tokens of a row are all right, so it never rises with j.
    `verify_costs[n - 1]` is the time that a step with n drafted tokens takes, and the switch to it, beyond that of as
    many decoded tokens as it brings if no draft is right. `token_time` is the time of a decoded token. What a step is
    expected to win must be more than `margin`; `is_allowed(cost, certain_tokens)` says whether a step may cost that
    much if only `certain_tokens` drafted tokens turn out right.

    Costs need not rise with n, so every n is looked at, with the likeliest tokens of all rows.
    """
    candidates = sorted(
        (-chance, position, row)
        for row, row_chances in enumerate(chances)
        for position, chance in enumerate(row_chances)
    )
    best_count, best_gain, expected_tokens, certain_tokens = 0, margin, 0.0, 0
    for number, (chance, _, _) in enumerate(candidates[: len(verify_costs)], 1):
        expected_tokens -= chance
        certain_tokens += chance == -1.0
        gain = expected_tokens * token_time - verify_costs[number - 1]
        if gain > best_gain and is_allowed(verify_costs[number - 1], certain_tokens):
            best_count, best_gain = number, gain
    if not best_count:
        return None
    lengths = [0] * len(chances)
    for _, _, row in candidates[:best_count]:
        lengths[row] += 1
    return lengths


# AcceptanceRates: how likely drafted tokens are right, learned from what was guessed and what came.
#
# Most guesses are compared with the tokens that plain decoding brings, which costs nothing. The first token of a guess
# is wrong more often than one that follows right ones, so chances are kept by the number of right ones before.


DraftSource = tuple[str, int]
"""A drafter's name and the confidence class of a draft."""

STREAKS = (1, 4, 12)
"""Tokens guessed right in succession are told apart in these classes: none, 1 .. 3, 4 .. 11, more."""

PRIOR, HEAD_PRIOR = (0.3, 0.6, 0.8, 0.9), (0.7, 0.7, 0.7, 0.7)
"""The chances of an unknown source, by class; and those of the model's draft head, which was trained for it."""

_OF_PRIOR, _OF_ALL = 4.0, 4.0
"""How many tokens the prior counts against those of all rows, and these against those of one row."""

_LONG, _SHORT = 200.0, 16.0
"""Over how many tokens the chances of all rows, and of one row, are averaged."""


class DecayingRate:
    """The share of guessed tokens that were right; older guesses count less."""

    def __init__(self, horizon: float) -> None:
        self.right_count = self.guess_count = 0.0
        self._decay = 1 - 1 / horizon

    def add(self, is_right: bool) -> None:
        """Count one guessed token as right or wrong."""
        self.right_count = self.right_count * self._decay + is_right
        self.guess_count = self.guess_count * self._decay + 1

    def mean(self, prior: float, prior_weight: float) -> float:
        """Return the share of right tokens, as if `prior_weight` more tokens had the share `prior`."""
        return (self.right_count + prior * prior_weight) / (self.guess_count + prior_weight)


def streak_class(streak: int) -> int:
    """Return the class (see `STREAKS`) of a number of right tokens in succession."""
    return sum(streak >= min_streak for min_streak in STREAKS)


class AcceptanceRates:
    """How likely guessed tokens are right, by their source, for all rows and for each row."""

    def __init__(self) -> None:
        self._shared_rates: dict[tuple[DraftSource, int], DecayingRate] = {}
        self._rates_by_job: dict[JobId, dict[tuple[DraftSource, int], DecayingRate]] = {}
        self._streaks: dict[JobId, int] = {}

    def streak(self, job: JobId) -> int:
        """Return how many of a row's newest tokens in succession were guessed right."""
        return self._streaks.get(job, 0)

    def record(
        self, job: JobId, source: DraftSource, is_right: bool, place: int | None = None, keep_streak: bool = False
    ) -> None:
        """Record whether the next token of a row was guessed right. `place`: see `estimate`. With `keep_streak`,
        the row's streak does not change.
        """
        streak = self.streak(job)
        key = source, streak_class(streak if place is None else place)
        self._shared_rates.setdefault(key, DecayingRate(_LONG)).add(is_right)
        self._rates_by_job.setdefault(job, {}).setdefault(key, DecayingRate(_SHORT)).add(is_right)
        if not keep_streak:
            self._streaks[job] = streak + 1 if is_right else 0

    def reset_streak(self, job: JobId) -> None:
        """Reset the streak of a row for which nothing was guessed."""
        self._streaks.pop(job, None)

    def estimate(self, job: JobId, source: DraftSource, tokens: int, place: int | None = None) -> list[float]:
        """Return the chances that a row's next 1, 2, .. `tokens` guessed tokens are all right. A `place` is given for a
        draft head: the index of the next token in its guess. Its later tokens are less often right, since it sees the
        model's state before the first only. Other drafters' tokens are likelier right after more right ones.
        """
        job_rates, streak = self._rates_by_job.get(job, {}), self.streak(job) if place is None else place
        chances, chance = [], 1.0
        by_class: dict[int, float] = {}
        priors = PRIOR if place is None else HEAD_PRIOR
        for position in range(tokens):
            class_index = streak_class(streak + position)
            if class_index not in by_class:
                shared_rate = self._shared_rates.get((source, class_index))
                mean = priors[class_index] if shared_rate is None else shared_rate.mean(priors[class_index], _OF_PRIOR)
                job_rate = job_rates.get((source, class_index))
                by_class[class_index] = mean if job_rate is None else job_rate.mean(mean, _OF_ALL)
            chance *= by_class[class_index]
            chances.append(chance)
        return chances

    @property
    def num_rows(self) -> int:
        """The number of rows of which something is known."""
        return len(self._rates_by_job.keys() | self._streaks.keys())

    def forget_row(self, job: JobId) -> None:
        """Forget a row that has ended."""
        self._rates_by_job.pop(job, None)
        self._streaks.pop(job, None)

    def forget_rows(self) -> None:
        """Forget all rows, but keep what was learned over all of them."""
        self._rates_by_job.clear()
        self._streaks.clear()
