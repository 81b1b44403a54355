"""The token budget of a step: what steps cost, what a target allows, and how prompts share it."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.scheduling.latency import LONE_SCORES, LONE_SECONDS, CostModel, share_budget
from cortexmlx.scheduling.plan import StepKind, StepPlan
from cortexmlx.scheduling.shortage import STEPS_TO_RELAX
from cortexmlx.types.request import FinishReason
from support.scheduling.clockwork import Clockwork
from support.scheduling.requests import commit


def prompt_tokens(plan: StepPlan, decoding: int) -> int:
    return len(plan.positions) - decoding


@pytest.mark.parametrize("cost", [1e-4, 1e-3, 4e-3])
def test_a_long_prompt_does_not_stall_those_who_decode(cost: float) -> None:
    clock = Clockwork(cost)
    for row in range(4):
        clock.add(row, 20)
    clock.step(6)
    clock.plans.clear()
    clock.add(9, 3000)
    clock.until_first(9)
    longest = max(seconds for _, seconds in clock.plans)
    assert longest <= max(0.1, cost * 20) * 1.01
    assert longest >= 0.1 * 0.8 or cost * 516 < 0.1, "the target must be used, not only kept"


def test_the_budget_follows_a_machine_that_becomes_slower() -> None:
    clock = Clockwork(1e-4)
    for row in range(4):
        clock.add(row, 20)
    clock.step(6)
    clock.add(9, 4000)
    clock.step(2)
    clock.cost = 2e-3
    clock.step(12)
    assert clock.plans[-1][1] < 0.12


@pytest.mark.parametrize("rows", [1, 8, 15])
def test_a_prompt_goes_on_at_sixteen_tokens_a_step_however_many_decode(rows: int) -> None:
    clock = Clockwork(cost=1.0)
    for row in range(rows):
        clock.add(row, 4)
    clock.step(40)
    clock.add(99, 100)
    clock.step(1)
    assert prompt_tokens(clock.plans[-1][0], rows) == 16


@pytest.mark.parametrize(("budget", "rows"), [(8, 3), (1, 0), (1, 5), (16, 15)])
@pytest.mark.parametrize("target", [None, 1e-6])
def test_a_step_never_computes_more_prompt_tokens_than_its_budget(budget: int, rows: int, target: float | None) -> None:
    clock = Clockwork(cost=1.0, target=target, budget=budget)
    for row in range(rows):
        clock.add(row, 1)
    clock.step(2 + 3 * rows if rows else 0)
    clock.add(99, 40)
    while 99 not in clock.first:
        clock.step()
        plan = clock.plans[-1][0]
        prompt = sum(s.count for s in plan.segments if s.job == 99)
        assert 1 <= prompt <= budget or plan.kind is not StepKind.MIXED


def test_nobody_decodes_so_the_whole_budget_is_used() -> None:
    clock = Clockwork(cost=1.0)
    clock.add(1, 2000)
    clock.step()
    assert len(clock.plans[-1][0].positions) == 512


def test_short_prompts_do_not_wait_for_the_end_of_a_long_one() -> None:
    clock = Clockwork(cost=1e-3, target=None, budget=64)
    clock.add(0, 4000)
    clock.step(3)
    for request in range(1, 4):
        clock.add(request, 10)
    clock.step(2)
    assert {1, 2, 3} <= set(clock.first) and 0 not in clock.first


# -- which steps teach ------------------------------------------------------------------------------------------------


def decoding(clock: Clockwork, rows: int) -> None:
    for row in range(rows):
        clock.add(row, 20)
    clock.step(6)


def test_steps_that_verify_drafts_say_nothing_about_prompts() -> None:
    clock = Clockwork(cost=1e-3)
    decoding(clock, 2)
    known = clock.scheduler.cost_model.seconds_per_token
    clock.cost = 1.0
    for _ in range(5):
        for job in clock.scheduler.draftable_jobs:
            clock.scheduler.set_drafts(job.id, [5, 5, 5])
        clock.step()
        assert clock.plans[-1][0].kind is StepKind.MIXED
    assert clock.scheduler.cost_model.seconds_per_token == known == pytest.approx(1e-3)


def test_drafts_beside_a_prompt_take_their_share_of_the_time() -> None:
    clock = Clockwork(cost=1e-3)
    decoding(clock, 2)
    clock.add(9, 3000)
    for _ in range(12):
        for job in clock.scheduler.draftable_jobs:
            clock.scheduler.set_drafts(job.id, [5] * 15)
        clock.step()
        assert 9 in {segment.job for segment in clock.plans[-1][0].segments}
    assert clock.scheduler.cost_model.seconds_per_token == pytest.approx(1e-3)


# -- the parts --------------------------------------------------------------------------------------------------------


@given(budget=st.integers(1, 300), needs=st.lists(st.integers(1, 500), max_size=12))
def test_shares_use_the_budget_and_nobody_gets_too_much(budget: int, needs: Sequence[int]) -> None:
    parts = share_budget(budget, list(needs))
    assert all(0 <= p <= n for p, n in zip(parts, needs, strict=True))
    assert sum(parts) == min(budget, sum(needs))
    if needs:
        assert parts[0] >= min(needs[0], (budget + 1) // 2), "the oldest goes on"


@given(
    steps=st.lists(st.tuples(st.integers(1, 600), st.floats(1e-5, 10)), max_size=8),
    seconds=st.floats(1e-6, 10),
    most=st.integers(1, 600),
)
def test_the_cost_model_stays_within_its_bounds(steps: list[tuple[int, float]], seconds: float, most: int) -> None:
    model = CostModel()
    for tokens, took in steps:
        model.observe(tokens, took)
    least = min(16, most)
    assert least <= model.tokens_within(seconds, least, most) <= most
    if steps:
        rates = [took / tokens for tokens, took in steps]
        assert model.seconds_per_token is not None
        assert min(rates) * 0.999 <= model.seconds_per_token <= max(rates) * 1.001


# Pieces while no row decodes: larger on an Apple GPU, as far as a new request does not wait long for them.


@pytest.mark.parametrize("cost", [1e-5, 4e-4, 1e-3, 1.4e-3, 1e-2])
def test_a_prompt_that_nobody_waits_beside_has_large_pieces_of_a_second_at_most(cost: float) -> None:
    clock = Clockwork(cost, lone_budget=2048)
    clock.add(1, 12000)
    clock.until_first(1)
    pieces = [len(plan.positions) for plan, _ in clock.plans]
    assert pieces[0] == 512, "nothing is known yet"
    assert max(pieces) == max(512, min(2048, int(LONE_SECONDS / cost)))
    position = 0
    for piece in pieces:
        assert piece <= 512 or piece * (position + piece) <= LONE_SCORES
        position += piece


def test_pieces_are_as_ever_beside_decoding_rows_and_after_a_refusal_of_memory() -> None:
    clock = Clockwork(1e-5, target=None, lone_budget=2048)
    clock.add(1, 6000)
    clock.until_first(1)
    assert max(len(plan.positions) for plan, _ in clock.plans) == 2048
    clock.plans.clear()
    clock.add(2, 6000)
    clock.until_first(2)
    assert max(len(plan.positions) for plan, _ in clock.plans) == 512
    alone = Clockwork(1e-5, lone_budget=2048)
    alone.scheduler.backoff.tighten(16)
    alone.add(1, 3000)
    alone.step(3)
    assert [len(plan.positions) for plan, _ in alone.plans] == [256] * 3


def test_a_larger_piece_that_is_refused_memory_is_not_tried_again_soon_and_costs_nothing_else() -> None:
    clock = Clockwork(1e-5, lone_budget=2048)
    for request in (1, 2, 3):
        clock.add(request, 4000)
        while request not in clock.first:
            plan = clock.scheduler.plan(0)
            assert plan is not None
            if len(plan.positions) > 1024:
                assert request == 1 and clock.scheduler.has_large_piece
                clock.scheduler.restart_rows(0)
                continue
            for row in commit(clock.scheduler, plan, [5] * len(plan.logit_rows), 1e-5):
                clock.first.setdefault(row.job.id, 0.0)
    assert clock.scheduler.restarts == 1 and not clock.scheduler.backoff.holds_back


def test_larger_pieces_are_tried_again_ever_more_seldom() -> None:
    clock, steps, waits = Clockwork(1e-5, lone_budget=2048), 0, []
    for request in range(1, 400):
        job = clock.add(request, 1500, tokens=1)
        while not job.state.final:
            plan = clock.scheduler.plan(0)
            assert plan is not None
            if len(plan.positions) > 512:
                waits.append(steps)
                clock.scheduler.restart_rows(0)
                steps = 0
                continue
            steps += 1
            for row in commit(clock.scheduler, plan, [5] * len(plan.logit_rows), 1e-5):
                clock.scheduler.finish(row.job.id, FinishReason.LENGTH)
    assert [round(wait / STEPS_TO_RELAX) for wait in waits[1:4]] == [1, 2, 4] and len(waits) == 5


@pytest.mark.parametrize("cost", [2e-4, 1e-3])
def test_who_comes_during_a_large_piece_waits_a_second_and_a_step_of_its_own(cost: float) -> None:
    clock = Clockwork(cost, lone_budget=2048)
    clock.add(1, 40000)
    clock.step(3)
    arrived = clock.now
    clock.step(1)  # it comes just as this one begins
    clock.add(2, 20)
    assert clock.until_first(2) - arrived <= 2 * LONE_SECONDS + cost


@given(min_tokens=st.integers(1, 512), lone=st.integers(0, 4096), context=st.integers(0, 1 << 20))
def test_a_lone_budget_is_never_below_the_usual_one(min_tokens: int, lone: int, context: int) -> None:
    model = CostModel()
    assert model.lone_budget(min_tokens, lone, context) == min_tokens
    model.observe(1, 1e-9)
    budget = model.lone_budget(min_tokens, lone, context)
    assert min_tokens <= budget <= max(min_tokens, lone)
    assert budget == min_tokens or budget * (context + budget) <= LONE_SCORES
