"""Drafting pays where texts repeat themselves, and costs next to nothing where they do not, whoever guesses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cortexmlx.scheduling.drafts import MAX_DRAFTS
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.speculation.drafter import TokenDraft
from support.effort import examples
from support.scheduling.adversaries import Act, adversary, texts_of
from support.scheduling.requests import job_of
from support.scheduling.speculating import CPU, GPU, Figures, Machine, Scripted, line, ran

RIGHT = Act(1000, right=16)
MACHINES = {"cpu": CPU, "gpu": GPU}
WIDE = Machine(
    line({1: 0.010, 16: 0.013, 32: 0.015, 64: 0.019}),
    line({1: 0.0105, 8: 0.0118, 16: 0.0133, 32: 0.0153, 64: 0.0195, 128: 0.03}),
    at_dispatch=False,
)
"""A GPU to which one token more is hardly anything, also for many rows."""


@cache
def plain(machine: str, rows: int, tokens: int, noise: float = 0.0) -> Figures:
    """The same texts without drafts."""
    return ran(MACHINES[machine], texts_of(rows, tokens), None, noise=noise)


def prose(rows: int, tokens: int, chance: float = 0.3, right: float = 0.35) -> Scripted:
    """Guesses now and then, each of whose tokens is seldom right."""
    texts, luck = texts_of(rows, tokens), random.Random(rows)

    def guess(job: Job, budget: int) -> tuple[list[int], int] | None:
        if luck.random() > chance:
            return None
        return [token * (luck.random() < right) for token in texts[job.id][job.num_generated :][:budget]], 0

    return Scripted(guess)


@pytest.mark.parametrize(("machine", "rows", "least"), [("gpu", 1, 4.0), ("cpu", 8, 1.2)])
def test_what_repeats_itself_is_faster(machine: str, rows: int, least: float) -> None:
    texts = texts_of(rows, 800)
    figures = ran(MACHINES[machine], texts, adversary(texts, [RIGHT]))
    assert figures.rate > least * plain(machine, rows, 800).rate


@pytest.mark.parametrize(("rows", "least"), [(8, 1.3), (12, 1.3), (32, 1.15)])
def test_many_rows_that_begin_at_once_draft_where_it_pays(rows: int, least: float) -> None:
    """From 12 rows on, the worst first try was more than could ever be lost."""
    texts = texts_of(rows, 200)
    drafting = ran(WIDE, texts, adversary(texts, [Act(200, 3)]), max_rows=32)
    assert drafting.rate > least * ran(WIDE, texts, None, max_rows=32).rate


def test_of_many_rows_a_few_drafted_tokens_cost_what_they_did_before() -> None:
    """Steps of 33 to 35 tokens share an estimate with those of 32, which no step of 32 rows looked up: 0.86x."""
    texts = texts_of(32, 120)
    drafting = ran(GPU, texts, adversary(texts, [RIGHT]), max_rows=32)
    assert drafting.rate > 0.97 * ran(GPU, texts, None, max_rows=32).rate


@pytest.mark.parametrize(
    ("machine", "rows", "noise"),
    [("gpu", 1, 0.3), ("cpu", 8, 0.3), ("gpu", 8, 0.0), ("cpu", 16, 0.0)],
)
def test_prose_is_not_slower(machine: str, rows: int, noise: float) -> None:
    tokens = 1600 if rows == 1 else 300
    figures = ran(MACHINES[machine], texts_of(rows, tokens), prose(rows, tokens), noise=noise)
    assert figures.rate > (0.98 if noise == 0 else 0.965) * plain(machine, rows, tokens, noise).rate


@pytest.mark.parametrize(("machine", "right"), [("cpu", 16), ("gpu", 4), ("cpu", 2), ("gpu", 1), ("cpu", 0)])
def test_sixteen_rows_are_never_slower_than_97_percent(machine: str, right: int) -> None:
    texts = texts_of(16, 200)
    figures = ran(MACHINES[machine], texts, adversary(texts, [Act(50, right)]))
    assert figures.rate > 0.97 * plain(machine, 16, 200).rate


ACTS = st.builds(
    Act,
    tokens=st.sampled_from([1, 3, 10, 30, 100, 300]),
    right=st.sampled_from([0, 1, 2, 4, 16]),
    chance=st.sampled_from([1.0, 0.5, 0.2]),
    when=st.sampled_from(["always", "pending", "drained"]),
    confidence_class=st.integers(0, 2),
)


def cost_of_adversary(machine: str, rows: int, acts: Sequence[Act], shift: int, seed: int) -> float:
    """How much slower the slowest 1,000 tokens are than those without drafts."""
    tokens = max(1600 // rows, 300)
    texts, base = texts_of(rows, tokens), plain(machine, rows, tokens)
    figures = ran(MACHINES[machine], texts, adversary(texts, acts, shift, seed))
    pace = 1 / base.rate
    return figures.slowest(1000, pace) / base.slowest(1000, pace)


ADVERSARIES = given(
    machine=st.sampled_from(["cpu", "gpu"]),
    rows=st.sampled_from([1, 2, 5, 16]),
    acts=st.lists(ACTS, min_size=1, max_size=4),
    shift=st.sampled_from([0, 7, 50]),
    seed=st.integers(0, 9),
)


@ADVERSARIES
@settings(max_examples=5, deadline=None)
def test_no_adversary_costs_more_than_three_percent_of_any_thousand_tokens(
    machine: str, rows: int, acts: list[Act], shift: int, seed: int
) -> None:
    assert cost_of_adversary(machine, rows, acts, shift, seed) <= 1.03


@pytest.mark.slow
@ADVERSARIES
@settings(max_examples=examples(200), deadline=None)
def test_none_of_many_adversaries_does(machine: str, rows: int, acts: list[Act], shift: int, seed: int) -> None:
    assert cost_of_adversary(machine, rows, acts, shift, seed) <= 1.03


@pytest.mark.parametrize(
    ("machine", "acts"),
    [
        ("gpu", [Act(400, 16), Act(5000, 0)]),
        ("cpu", [Act(40, 16), Act(40, 0)]),
        ("gpu", [Act(5000, 16, when="pending")]),
        ("cpu", [Act(5000, 16, when="drained")]),
        ("gpu", [Act(5000, 1)]),
    ],
    ids=["right, then wrong for ever", "alternating", "right while unobserved", "right when observed", "one is right"],
)
def test_who_looks_good_and_then_fails_costs_three_percent_at_most(machine: str, acts: list[Act]) -> None:
    assert cost_of_adversary(machine, 1, acts, 0, 0) <= 1.03


def test_nobody_is_asked_where_even_right_guesses_do_not_pay() -> None:
    dear = Machine(lambda rows: 0.01, lambda tokens: 0.01 * tokens, at_dispatch=True)
    texts = texts_of(2, 400)
    drafter = adversary(texts, [RIGHT])
    figures = ran(dear, texts, drafter)
    assert figures.rate > 0.97 * ran(dear, texts, None).rate
    assert drafter.asked < 20


def test_drafts_of_others_are_left_alone_and_counted() -> None:
    """`Scheduler.set_drafts` is for everybody."""
    texts = texts_of(1, 100)
    figures = Figures(CPU, [Scripted(lambda job, budget: None)])
    figures.add(0, texts[0])
    while figures.scheduler.jobs:
        for job in figures.scheduler.draftable_jobs:
            figures.scheduler.set_drafts(job.id, texts[0][job.num_generated :][:6])
        figures.step()
    assert len(figures.times) < 60
    assert figures.verified > 10 and figures.speculation.counts["scripted"].drafted == 0


def test_counts_tell_drafted_and_accepted_tokens() -> None:
    texts = texts_of(1, 600)
    figures = ran(CPU, texts, adversary(texts, [Act(600, 7)]))
    counts = figures.speculation.counts["scripted"]
    assert 0 < counts.accepted < counts.drafted
    assert len(figures.times) - 1 + counts.accepted == pytest.approx(600, abs=20)


def test_certain_drafts_are_verified_whatever_the_purse_says() -> None:
    text = texts_of(1, 300)[0]

    class Forced(Scripted):
        def propose(self, jobs: Sequence[Job], budget: int) -> list[TokenDraft | None]:
            rests = [text[job.num_generated : job.num_generated + budget] for job in jobs]
            return [TokenDraft(rest, certain=True) if rest else None for rest in rests]

    figures = Figures(CPU, [Forced(lambda job, budget: None)])
    figures.add(0, text)
    figures.speculation.ledger.loss_budget.add_gain(-100.0)
    figures.until_one_ends()
    assert figures.rate > 3 * plain("cpu", 1, 800).rate


def test_a_job_that_ends_and_an_engine_that_begins_anew_leave_nothing() -> None:
    texts = texts_of(2, 60)
    figures = ran(CPU, texts, adversary(texts, [RIGHT]))
    speculation = figures.speculation
    while figures.scheduler.jobs:
        figures.step()
    assert not speculation._guesses and not speculation._drafted_jobs
    figures.add(1, texts[1])
    for _ in range(8):
        figures.step()
    assert speculation._guesses
    speculation.forget()
    assert not speculation._guesses and not speculation._drafted_jobs


@pytest.mark.parametrize("more", [0, 3, 40])
def test_a_guess_is_judged_also_if_its_text_has_dropped_most_tokens_since(more: int) -> None:
    """While steps are kept small after a refusal nobody looks at guesses, and the text may drop what they were about:
    the step failed.
    """
    text = texts_of(1, 100)[0]
    figures = Figures(CPU, [Scripted(lambda job, budget: (text[job.num_generated :][:budget], 0))])
    job = job_of(0, [1, 2, 3], max_tokens=100, keep=KeepPolicy(2, 6))
    speculation = figures.speculation
    speculation._update_guesses([job])
    assert len(speculation._guesses[job.id].remaining) == MAX_DRAFTS + 1
    for token in text[: 4 + more]:
        job.append_token(token)
        job.drop_tokens()
    speculation._check_guess(job)
    assert (job.id in speculation._guesses) is (4 + more <= MAX_DRAFTS)
    assert speculation.acceptance_rates.streak(job.id) == (4 + more if more < 40 else 0)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("pending", [0, 1, 2])
def test_a_guess_is_worth_what_comes_after_the_tokens_in_flight(pending: int, certain: bool) -> None:
    class Sure(Scripted):
        def propose(self, jobs: Sequence[Job], budget: int) -> list[TokenDraft | None]:
            return [TokenDraft(range(budget), certain=certain) for _ in jobs]

    speculation = Figures(CPU, [Sure(lambda job, budget: None)]).speculation
    job = job_of(0, [1, 2, 3])
    speculation._update_guesses([job])
    job.num_planned_outputs = job.num_generated + pending
    every = (
        [1.0] * MAX_DRAFTS if certain else speculation.acceptance_rates.estimate(job.id, ("scripted", 0), MAX_DRAFTS)
    )
    assert speculation._guess_chances(job) == every[pending:]


def test_a_guess_that_was_wrong_is_forgotten() -> None:
    speculation = Figures(CPU, [Scripted(lambda job, budget: (range(budget), 0))]).speculation
    job = job_of(0, [1, 2, 3])
    speculation._update_guesses([job])
    job.append_token(0)
    job.append_token(7)
    speculation._check_guess(job)
    assert job.id not in speculation._guesses and speculation.acceptance_rates.streak(job.id) == 0


def test_rows_that_fail_together_leave_no_chances() -> None:
    texts = texts_of(3, 200)
    figures = ran(CPU, texts, adversary(texts, [Act(200, 3)]))
    assert figures.speculation.acceptance_rates.num_rows
    figures.speculation.forget()
    assert not figures.speculation.acceptance_rates.num_rows


# -- drafters that take time ------------------------------------------------------------------------------------------


class Slow(Scripted):
    """A drafter whose guesses take time, each token of which is right with some chance."""

    name = "model"
    needs_drained_pipeline = True
    max_tokens = 99

    def __init__(self, texts: Sequence[Sequence[int]], right: float, seconds: float) -> None:
        super().__init__(lambda job, budget: None)
        self.figures: Figures | None = None
        self._texts, self._right, self._seconds = texts, right, seconds
        self._random = random.Random(5)

    def estimate_seconds(self, rows: int, tokens: int) -> float | None:
        """See `SlowDrafter`."""
        return self._seconds * tokens if self.asked else None

    def propose(self, jobs: Sequence[Job], budget: int) -> list[TokenDraft | None]:
        """See `Drafter`."""
        assert self.figures is not None
        assert all(job.num_planned_outputs == job.num_generated for job in jobs), "something is in flight"
        self.asked += len(jobs)
        self.figures.now += self.figures.slow_down(self._seconds * budget)
        rests = [self._texts[job.id][job.num_generated :][:budget] for job in jobs]
        return [TokenDraft([t * (self._random.random() < self._right) for t in rest]) for rest in rests]


def cost_on_a_busy_machine(machine: Machine, rows: int, right: float, slow: bool, seed: int) -> float:
    """How much more work the slowest 1,000 tokens are than without drafts, after four rows at most have been seen. Each
    guessed token is right with some chance.
    """
    tokens, chance = max(2400 // rows, 240), random.Random(seed)
    texts = [*texts_of(rows, tokens), *[[7] * 200] * min(rows, 4)]

    def guess(job: Job, budget: int) -> tuple[list[int], int]:
        return [token * (chance.random() < right) for token in texts[job.id][job.num_generated :][:budget]], 0

    def run(drafts: bool) -> tuple[Figures, int]:
        model = Slow(texts, right, 0.12 * machine.decode(rows))
        figures = Figures(
            machine, [Scripted(guess)] if drafts and not slow else [], [model] if drafts and slow else [], busy=seed
        )
        model.figures = figures
        for number, text in list(enumerate(texts))[rows:]:
            figures.add(number, text)
        while figures.scheduler.jobs:
            figures.step()
        begin = len(figures.times) + 4
        for number, text in enumerate(texts[:rows]):
            figures.add(number, text)
        while len(figures.scheduler.jobs) == rows:
            figures.step()
        del figures.times[:begin]
        return figures, begin

    figures, base = run(True)[0], run(False)[0]
    pace = (base.times[-1][0] - base.times[0][0]) / (base.times[-1][1] - base.times[0][1])
    return figures.slowest(1000, pace) / base.slowest(1000, pace)


@pytest.mark.parametrize(
    ("rows", "right", "slow", "seed"), [(1, 0.6, True, 3), (4, 0.6, True, 0), (8, 0.8, True, 2), (16, 0.9, False, 1)]
)
def test_busy_moments_cost_four_percent_at_most(rows: int, right: float, slow: bool, seed: int) -> None:
    """A price that was taken in one was believed for thousands of tokens: 0.74x to 0.87x."""
    assert cost_on_a_busy_machine(CPU, rows, right, slow, seed) <= 1.04


@pytest.mark.parametrize(
    ("machine", "right", "seconds", "least"),
    [("gpu", 0.9, 0.002, 1.4), ("gpu", 0.3, 0.002, 0.985), ("cpu", 0.9, 0.012, 1.1), ("cpu", 0.0, 0.03, 0.985)],
)
def test_a_draft_model_is_asked_only_where_it_pays(machine: str, right: float, seconds: float, least: float) -> None:
    texts = texts_of(1, 1200)
    slow = Slow(texts, right, seconds)
    figures = slow.figures = Figures(MACHINES[machine], [], [slow])
    figures.add(0, texts[0])
    figures.until_one_ends()
    assert figures.rate > least * plain(machine, 1, 1200).rate
    assert slow.asked and (least > 1 or slow.asked < 20)


def test_where_two_guess_the_likelier_is_drafted_and_the_other_still_judged() -> None:
    """Prose, where the text's own repetitions are wrong: the slow drafter's guesses. Then an edit, where they are right
    more often than those.
    """
    (text,) = texts_of(1, 1200)
    scripted = Scripted(lambda job, budget: ([t * (job.num_generated > 600) for t in text[job.num_generated :]], 0))
    slow = Slow([text], 0.7, 0.002)
    figures = slow.figures = Figures(MACHINES["gpu"], [scripted], [slow])
    figures.add(0, text)
    counts, drafted = figures.speculation.counts, {}
    while figures.scheduler.jobs:
        figures.step()
        if figures.scheduler.jobs and figures.scheduler.jobs[0].num_generated < 600:
            drafted = {name: each.drafted for name, each in counts.items()}
    assert drafted["model"] > 5 * drafted["scripted"]
    assert counts["scripted"].accepted > 400 and counts["model"].drafted < 1.4 * drafted["model"]
