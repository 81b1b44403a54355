"""One sequence at a time under random requests, cancellations, pressure and caches that cannot be cut: what is computed
always stands behind the row's own tokens.
"""

from __future__ import annotations

import zlib
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from cortexmlx.execution.serial_runner import COUNTING_GROUPS, SingleSequenceCache
from cortexmlx.kv.pools import BlockPools
from cortexmlx.kv.prefix import PrefixCache
from cortexmlx.scheduling.job import Job
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.scheduler import Scheduler, SchedulerConfig
from cortexmlx.types.request import FinishReason, RequestState
from cortexmlx.types.sampling_params import SamplingParams
from support.effort import examples
from support.scheduling.requests import add, commit

VOCAB = 5
THEMES = ([1, 2, 3, 4] * 20, [4, 4, 1] * 25, [0, 2] * 40)


def after(tokens: list[int]) -> int:
    """The token that follows these, and no others."""
    return zlib.crc32(bytes(tokens)) % VOCAB


class Held:
    """What caches would keep: the tokens themselves. `cuts`: whether they can be cut back now."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cuts = True

    def rewind(self, tokens: int) -> bool:
        if tokens > len(self.tokens) or (0 < tokens < len(self.tokens) and not self.cuts):
            return False
        del self.tokens[tokens:]
        return True


class Machine:
    """A scheduler of one row whose plans are carried out on `Held`, as the core and the runner do."""

    def __init__(self, block_size: int, blocks: int, budget: int, pipeline: bool, share: bool) -> None:
        self.held = Held()
        pools = BlockPools(COUNTING_GROUPS, 1, block_size, max_blocks=blocks, prefix=PrefixCache(block_size))
        self.cache = SingleSequenceCache((), pools, self.held.rewind)
        config = SchedulerConfig(
            max_rows=1, prefill_budget=budget, context_length=150, pipeline=pipeline, share_prefixes=share
        )
        self.scheduler = Scheduler(self.cache, config)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.jobs: list[Job] = []
        self.computed = 0

    def ask(
        self,
        prompt: list[int],
        tokens: int,
        stop: bool = False,
        priority: int = 0,
        client: str | None = None,
        parent: Job | None = None,
    ) -> Job:
        stops = frozenset([VOCAB - 1]) if stop else frozenset()
        params = SamplingParams(max_tokens=tokens, priority=priority)
        job = add(self.scheduler, len(self.jobs), prompt, params, 0, stops, client=client, fork_of=parent)
        self.jobs.append(job)
        return job

    def step(self) -> None:
        plan = self.scheduler.plan(len(self.in_flight))
        if plan is not None:
            self.in_flight.append((plan, self._carry_out(plan)))
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            done, tokens = self.in_flight.popleft()
            commit(self.scheduler, done, tokens, 0.001)
        self.scheduler.check_invariants()

    def finish(self) -> None:
        for _ in range(5000):
            if self.scheduler.is_idle and not self.in_flight:
                return
            self.step()
        raise AssertionError("it never comes to an end")

    def _carry_out(self, plan: StepPlan) -> list[int]:
        if plan.kind is StepKind.FLUSH:
            return []
        (segment,) = plan.segments
        assert segment.first == len(self.held.tokens), "the row does not begin where the caches end"
        tokens = self._last if plan.tokens is None else plan.tokens.tolist()
        self.held.tokens += tokens
        self.computed += len(tokens)
        self._last = [after(self.held.tokens)]
        return self._last if segment.logits else []

    def check(self) -> None:
        """Every job has just the tokens that its own prompt leads to."""
        for job in self.jobs:
            for place in range(job.prompt_length, len(job.tokens)):
                assert job.tokens[place] == after(job.tokens[:place]), f"job {job.id} has a wrong token"
            if job.state is RequestState.FINISHED and job.finish_reason is FinishReason.LENGTH:
                assert job.num_generated == job.max_new_tokens


ASK = st.tuples(
    st.just("ask"),
    st.integers(0, 2),
    st.integers(1, 70),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, None, "one", "other"]),
    st.booleans(),
)
ELSE = st.tuples(
    st.sampled_from(["step", "step", "cancel", "again", "cuts", "warning", "critical"]), st.integers(0, 30)
)


def _asked(alike: int, most: int) -> tuple[object, ...]:
    return ("ask", 0, alike, [], most, False, None, False)


SOURCE_IS_GONE = [_asked(1, 1), _asked(2, 3), ("again", 0), _asked(3, 1)]
"""The second begins with a part of the first one's block, and the fourth like the second, when the third has been."""


@settings(max_examples=examples(40))
@given(
    st.sampled_from([1, 4, 8]),
    st.integers(90, 200),
    st.integers(1, 40),
    st.booleans(),
    st.lists(ASK | ELSE, max_size=25),
)
@example(4, 90, 1, False, SOURCE_IS_GONE)
def test_whatever_is_asked_each_request_gets_its_own_tokens(
    block_size: int, tokens: int, budget: int, pipeline: bool, happens: list[tuple[object, ...]]
) -> None:
    machine = Machine(block_size, tokens // block_size, budget, pipeline, share=True)
    for what, *how in happens:
        if what == "ask":
            theme, alike, rest, most, stop, client, forks = how
            prompt = [*THEMES[theme][:alike], *rest]  # type: ignore[index,misc]
            parent = machine.ask(prompt, most, stop, client=client)  # type: ignore[arg-type]
            if forks:
                machine.ask(prompt, most, stop, client=client, parent=parent)  # type: ignore[arg-type]
        elif what == "step":
            for _ in range(how[0]):  # type: ignore[call-overload]
                machine.step()
        elif what == "cancel" and machine.jobs:
            job = machine.jobs[how[0] % len(machine.jobs)]  # type: ignore[operator]
            machine.scheduler.finish(job.id, FinishReason.CANCELLED, RequestState.CANCELLED)
        elif what == "again" and machine.jobs:
            job = machine.jobs[how[0] % len(machine.jobs)]  # type: ignore[operator]
            machine.ask([*job.tokens[:80], 1, 2], 9, client=job.client)
        elif what == "cuts":
            machine.held.cuts = not machine.held.cuts
        elif what in ("warning", "critical"):
            machine.scheduler.relieve_memory(what == "critical")
    machine.finish()
    machine.check()


def test_a_second_turn_computes_only_what_is_new() -> None:
    machine = Machine(8, 20, 64, True, True)
    first = machine.ask(THEMES[0][:30], 20)
    machine.finish()
    machine.computed = 0
    second = machine.ask([*first.tokens, 2, 2, 2], 5)
    machine.finish()
    assert second.cached == 49 and machine.computed == 1 + 3 + 4, "the last token of an answer is never computed"
    machine.check()


def test_a_text_that_leaves_the_last_one_early_takes_over_what_they_share() -> None:
    machine = Machine(8, 20, 64, True, True)
    machine.ask(THEMES[0][:60], 4)
    machine.finish()
    for shared in (43, 40, 17, 0):
        job = machine.ask([*THEMES[0][:shared], 0, 0, 0], 4)
        machine.finish()
        assert job.cached == shared
    machine.check()


@pytest.mark.parametrize(("shares", "themes"), [(True, (0, 1, 0)), (False, (0, 0))])
def test_what_came_before_the_last_text_or_is_not_shared_is_gone(shares: bool, themes: tuple[int, ...]) -> None:
    machine = Machine(8, 40, 64, True, shares)
    for theme in themes:
        job = machine.ask(THEMES[theme][:40], 4)
        machine.finish()
        assert job.cached == 0
    machine.check()


def test_what_cannot_be_cut_is_gone_on_with_or_begun_anew() -> None:
    machine = Machine(8, 20, 64, True, True)
    machine.held.cuts = False
    first = machine.ask(THEMES[0][:30], 10)
    machine.finish()
    second = machine.ask([*first.tokens, 2], 10)
    machine.finish()
    assert second.cached == 39
    third = machine.ask([*second.tokens[:45], 2], 10)
    machine.finish()
    assert third.cached == 0
    machine.check()
