"""Admission beside rules that can be checked by hand: no row and no memory is left unused without a reason."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cortexmlx.scheduling.job import Job
from cortexmlx.types.request import RequestState
from support.effort import examples
from support.scheduling.desk import Desk
from support.scheduling.requests import commit

CLIENTS = (None, "a", "b", "c")
BLOCKS, ROWS, SIZE = 24, 4, 8
LONGEST = BLOCKS * SIZE - 40
WAITS = (RequestState.WAITING, RequestState.PREEMPTED)


class AdmissionMachine(RuleBasedStateMachine):
    """Prompts share nothing, and answers are shorter than what is charged in advance."""

    @initialize(client_tokens=st.sampled_from([None, None, 100]))
    def begin(self, client_tokens: int | None) -> None:
        self.client_tokens = client_tokens
        self.desk = Desk(BLOCKS, max_rows=ROWS, headroom=0, share_prefixes=False, client_tokens=client_tokens)
        self.jobs: list[Job] = []

    @rule(
        client=st.sampled_from(CLIENTS),
        count=st.integers(1, 5),
        prompt=st.one_of(st.integers(1, 20), st.integers(1, LONGEST)),
        answer=st.integers(1, 40),
        priority=st.sampled_from([-1, 0, 0, 2**31 - 1]),
    )
    def ask(self, client: str | None, count: int, prompt: int, answer: int, priority: int) -> None:
        for _ in range(count):
            self.jobs.append(self.desk.ask([1] * prompt, client, max_tokens=answer, priority=priority))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.desk.cancel(data.draw(st.sampled_from([job for job in self.jobs if not job.finish_reason])))

    @rule(count=st.integers(1, 30))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs if job.state in WAITS]

    def firsts(self) -> list[Job]:
        """The first of each client's jobs that wait."""
        clients = {job.client for job in self.waiting}
        return [min((j for j in self.waiting if j.client == c), key=lambda j: j.order) for c in clients]

    def step(self) -> None:
        waiting = {job: job.preemptions for job in self.waiting}
        scheduler = self.desk.scheduler
        preemptions = scheduler.preemptions
        plan = scheduler.plan(0)
        begun = [job for job, before in waiting.items() if job.is_running and job.preemptions == before]
        stayed = [job for job, before in waiting.items() if job in self.waiting and job.preemptions == before]
        for job in begun:
            assert not [j for j in stayed if j.client == job.client and j.order < job.order], "priority, then age"
        if scheduler.preemptions == preemptions:  # that lets go of memory after who may begin was decided
            self.nothing_is_unused()
        scheduler.check_invariants()
        if plan is not None:
            commit(scheduler, plan, [5] * len(plan.logit_segments))

    def nothing_is_unused(self) -> None:
        scheduler, turns = self.desk.scheduler, self.desk.turns
        if scheduler.rows_running == ROWS or not self.waiting:
            return
        assert scheduler.rows_running, "the first row always fits"
        allowed = [job for job in self.firsts() if self.within_share(job)]
        large = [job for job in allowed if not self.fits(job)]
        for job in allowed:
            kept_free = [
                other
                for other in large
                if other is not job
                and turns.tokens(other.client) + len(other.tokens) + other.max_new_tokens - other.num_generated
                < turns.tokens(job.client)
            ]
            assert job in large or kept_free, f"job {job.id} could begin"

    def fits(self, job: Job) -> bool:
        need = -(-len(job.tokens) // SIZE) + self.desk.scheduler.rows_running
        return need <= self.desk.cache.stats().free_blocks

    def within_share(self, job: Job) -> bool:
        running = [j.max_total_tokens for j in self.jobs if j.is_running and j.client == job.client]
        bounded = self.client_tokens is not None and job.client is not None and running
        return not bounded or sum(running) + job.max_total_tokens <= self.client_tokens

    def teardown(self) -> None:
        left = sum(job.prompt_length + job.max_new_tokens for job in getattr(self, "jobs", []))
        for _ in range(20 * left):
            if self.desk.scheduler.is_idle:
                break
            self.step()
        for job in getattr(self, "jobs", []):
            assert job.finish_reason is not None
        if hasattr(self, "desk"):
            assert len(self.desk.turns) == 0


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=examples(20, few=12), stateful_step_count=20, deadline=None)


@pytest.mark.slow
class TestAdmissionAtLength(AdmissionMachine.TestCase):
    settings = settings(max_examples=examples(400), stateful_step_count=30, deadline=None)
