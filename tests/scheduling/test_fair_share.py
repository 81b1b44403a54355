"""Turns against a plain model that forgets nothing, and the bound on how far two clients can be apart."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cortexmlx.scheduling.fair_share import ADVANCE, QUANTUM, ClientQueues, FairShare
from cortexmlx.scheduling.job import Job
from support.effort import examples
from support.scheduling.requests import job_of

CLIENTS = (None, "a", "b", "c")
LONGEST_PROMPT, LONGEST_ANSWER = 300, 400
LARGEST = LONGEST_PROMPT + ADVANCE


class Model:
    """What each client has had, kept for ever; a list of who waits and one of who runs."""

    def __init__(self) -> None:
        self.had: dict[str | None, int] = {}
        self.came: dict[str | None, int] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.now = self.arrivals = 0

    def arrive(self, job: Job, again: bool) -> None:
        if all(other.client != job.client for other in self.waiting):
            self.arrivals += 1
            self.came[job.client] = self.arrivals
            least = self.now + (0 if again else QUANTUM)
            self.had[job.client] = max(least, self.had.get(job.client, 0))
        self.waiting.append(job)

    def first(self, jobs: Iterable[Job]) -> Job | None:
        return min(jobs, key=lambda job: (self.had[job.client], self.came[job.client], job.order), default=None)

    def forget_if_idle(self) -> None:
        if not self.waiting and not self.running:
            self.had.clear()
            self.now = 0


class TurnsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.turns, self.model = FairShare(), Model()
        self.lines = ClientQueues(self.turns)
        self.jobs = 0
        self.prices: dict[Job, int] = {}
        self.served: dict[str | None, int] = {}
        self.later = 0
        self.since: dict[tuple[str | None, str | None], tuple[int, int]] = {}

    def cost(self, job: Job) -> int:
        """What a job that has begun costs: computed from its tokens alone."""
        answer = len(job.tokens) - job.prompt_length
        if job in self.model.running:
            answer = max(answer, min(ADVANCE, job.max_new_tokens))
        return self.prices[job] + answer

    def charge(self, job: Job, before: int, at_beginning: bool = False) -> None:
        due = self.cost(job) - before
        self.served[job.client] = self.served.get(job.client, 0) + due
        self.model.had[job.client] += due
        if not at_beginning:
            self.later += abs(due)

    def settle(self) -> None:
        for job in self.model.running:
            before = job.paid_tokens
            if self.turns.settle(job):
                self.lines.reorder_client(job.client)
            self.charge(job, before)

    @rule(
        client=st.sampled_from(CLIENTS),
        count=st.integers(1, 4),
        prompt=st.integers(1, LONGEST_PROMPT),
        answer=st.integers(1, LONGEST_ANSWER),
        priority=st.integers(-2, 2),
    )
    def ask(self, client: str | None, count: int, prompt: int, answer: int, priority: int) -> None:
        for _ in range(count):
            self.jobs += 1
            job = job_of(self.jobs, [1] * prompt, answer, client=client, priority=priority)
            self.arrive(job)

    def arrive(self, job: Job) -> None:
        self.turns.arrive(job)
        self.lines.reorder_client(job.client)
        self.lines.add(job)
        self.model.arrive(job, again=job.generation > 0)

    @precondition(lambda self: self.model.waiting)
    @rule(count=st.integers(1, 6), cached=st.floats(0, 1))
    def begin(self, count: int, cached: float) -> None:
        for _ in range(min(count, len(self.model.waiting))):
            self.settle()
            job = self.lines.first
            assert job is not None and job is self.model.first(self.model.waiting)
            self.model.waiting.remove(job)
            self.model.running.append(job)
            self.model.now = max(self.model.now, self.model.had[job.client])
            job.num_computed_tokens = int(cached * (len(job.tokens) - 1))
            if job not in self.prices:
                self.prices[job] = job.prompt_length - job.num_computed_tokens
            before = job.paid_tokens
            self.lines.remove(job)
            self.turns.begin(job)
            self.lines.reorder_client(job.client)
            self.charge(job, before, at_beginning=True)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), tokens=st.integers(1, LONGEST_ANSWER))
    def generate(self, data: st.DataObject, tokens: int) -> None:
        job = data.draw(st.sampled_from(self.model.running))
        job.tokens += [1] * min(tokens, job.max_new_tokens - job.num_generated)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), again=st.booleans())
    def lose_the_row(self, data: st.DataObject, again: bool) -> None:
        job = data.draw(st.sampled_from(self.model.running))
        before = job.paid_tokens
        self.model.running.remove(job)
        self.charge(job, before)
        if again:
            job.generation += 1
            self.arrive(job)
            return
        self.turns.end(job)
        self.lines.reorder_client(job.client)
        self.model.forget_if_idle()

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.model.waiting))
        self.model.waiting.remove(job)
        self.lines.remove(job)
        self.turns.withdraw(job)
        self.model.forget_if_idle()

    @rule(clients=st.sets(st.sampled_from(CLIENTS)))
    def pass_some_over(self, clients: set[str | None]) -> None:
        present = [client for client in clients if any(job.client == client for job in self.model.waiting)]
        for client in present:
            self.lines.pass_over(client)
        assert self.lines.first is self.model.first(job for job in self.model.waiting if job.client not in present)
        self.lines.bring_back()

    @invariant()
    def the_model_agrees(self) -> None:
        self.turns.check_invariants()
        assert self.lines.first is self.model.first(self.model.waiting)
        for job in (*self.model.waiting, *self.model.running):
            assert self.turns.tokens(job.client) == self.model.had[job.client]

    @invariant()
    def clients_that_wait_are_served_alike(self) -> None:
        """Of two that have waited all the time neither is more than a request ahead at any moment, so the tokens that
        they got since differ by two requests at most; and by what was charged later than at a beginning.
        """
        waiting = sorted({job.client for job in self.model.waiting}, key=str)
        pairs = list(combinations(waiting, 2))
        self.since = {pair: self.since.get(pair, (self.ahead(*pair), self.later)) for pair in pairs}
        for pair, (before, later) in self.since.items():
            assert abs(self.ahead(*pair) - before) <= 2 * LARGEST + 2 * (self.later - later)
            if self.later == 0:
                assert abs(self.turns.tokens(pair[0]) - self.turns.tokens(pair[1])) <= LARGEST + QUANTUM

    def ahead(self, a: str | None, b: str | None) -> int:
        """Tokens that one client was served more than another."""
        return self.served.get(a, 0) - self.served.get(b, 0)

    def teardown(self) -> None:
        while self.model.waiting:
            self.begin(1, 0.0)
        for job in list(self.model.running):
            self.model.running.remove(job)
            self.turns.end(job)
        assert len(self.turns) == 0 and len(self.lines) == 0


TestTurns = TurnsMachine.TestCase
TestTurns.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestTurnsAtLength(TurnsMachine.TestCase):
    settings = settings(max_examples=examples(2000), stateful_step_count=50, deadline=None)
