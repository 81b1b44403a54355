"""What drafting costs and wins, from the times of a scheduler's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cortexmlx.scheduling.job import Job
from cortexmlx.speculation.costs import BUDGET_REFILL, BUDGET_START, MAX_UNSEEN_TOKENS
from support.scheduling.adversaries import Act, adversary, texts_of
from support.scheduling.speculating import CPU, GPU, Figures, Machine, Scripted, ran

TEXTS = texts_of(4, 3000)


def running(machine: Machine, right: int, rows: int = 1, chance: int = 1) -> Figures:
    """Rows that decode, with guesses of which `right` tokens are right, at each `chance`-th token."""

    def guess(job: Job, budget: int) -> tuple[list[int], int] | None:
        if job.num_generated % chance:
            return None
        text = TEXTS[job.id][job.num_generated : job.num_generated + budget]
        return [token if place < right else 0 for place, token in enumerate(text)], 0

    figures = Figures(machine, [Scripted(guess)])
    for number in range(rows):
        figures.add(number, TEXTS[number])
    return figures


@pytest.mark.parametrize(("machine", "rows"), [(CPU, 1), (CPU, 4), (GPU, 1), (GPU, 4)])
def test_a_decode_step_is_known_by_its_share_of_the_time_however_it_is_counted(machine: Machine, rows: int) -> None:
    """On a CPU the first step of a pipeline is counted double, and the last not at all."""
    figures = running(machine, 0, rows)
    for _ in range(60):
        figures.step()
    costs = figures.speculation.ledger.costs
    decode = costs.decode_time(rows)
    assert decode is not None
    assert decode * costs.unit == pytest.approx(machine.decode(rows), rel=0.06)


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_verifying_steps_cost_what_the_machine_says_and_a_switch_little(machine: Machine) -> None:
    figures = running(machine, 5, chance=8)
    for _ in range(600):
        figures.step()
    ledger = figures.speculation.ledger
    decode = ledger.costs.decode_time(1)
    assert decode is not None and figures.verified > 20
    tokens = max(ledger.costs._verify_estimates[1])
    cost = ledger.costs.verify_times(1, tokens - 1, decode)[-1] * ledger.costs.unit
    assert cost == pytest.approx(machine.mixed(tokens), rel=0.15)
    assert ledger.switch_cost < 0.3


def test_a_long_run_of_verifying_steps_stops_now_and_then_to_see_what_decoding_costs() -> None:
    """The more seldom, the oftener that was confirmed."""
    figures = running(GPU, 16)
    ledger, runs = figures.speculation.ledger, [0]
    while figures.scheduler.jobs:
        figures.step()
        runs[-1] = max(runs[-1], ledger._unseen_tokens)
        if runs[-1] and not ledger._unseen_tokens:
            runs.append(0)
    assert min(runs[:2]) < 100 and MAX_UNSEEN_TOKENS <= max(runs) < MAX_UNSEEN_TOKENS + 20 and len(runs) < 9


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_another_programs_burst_in_one_step_does_not_end_drafting(machine: Machine) -> None:
    figures = running(machine, 16, rows=4)
    while figures.verified < 10:
        figures.step()
    verified = figures.verified
    figures.machine = replace(machine, mixed=lambda tokens: 5 * machine.mixed(tokens))
    while figures.verified == verified:
        figures.step()
    figures.machine = machine
    for _ in range(60):
        figures.step()
    assert figures.verified > verified + 20 and figures.speculation.ledger.loss_budget.level > 0


def test_the_purse_counts_all_that_was_lost() -> None:
    """Guesses that are wrong as soon as they are verified: what the purse lost is what the clock shows."""
    texts = [TEXTS[0][:1500]]
    figures, plain = ran(CPU, texts, adversary(texts, [Act(1500, 1, when="pending")])), ran(CPU, texts, None)
    lost = figures.now - plain.now
    purse = figures.speculation.ledger.loss_budget
    filled = BUDGET_START + 1500 * BUDGET_REFILL - purse.level
    assert lost / 0.0495 == pytest.approx(filled, abs=6)
    assert purse.level >= -1


def test_prices_are_unknown_before_a_decode_step_was_seen() -> None:
    figures = running(CPU, 16)
    ledger = figures.speculation.ledger
    assert ledger.estimate_prices(1, 4, pending=False) is None
    for _ in range(4):
        figures.step()
    prices = ledger.estimate_prices(1, 4, pending=True)
    assert prices is not None and prices.can_pay
    drained = ledger.estimate_prices(1, 4, pending=False)
    assert drained is not None and all(a < b for a, b in zip(drained.verify_costs, prices.verify_costs, strict=True))


def test_wrong_drafts_are_taken_out_of_the_purse_by_what_they_cost() -> None:
    figures = Figures(CPU, [Scripted(lambda job, budget: None)])
    figures.add(0, TEXTS[0])
    ledger = figures.speculation.ledger
    for _ in range(20):
        figures.step()
    before, verified = ledger.loss_budget.level, 0
    while verified < 4:
        drained = not figures._in_flight
        for job in figures.scheduler.draftable_jobs if drained else ():
            figures.scheduler.set_drafts(job.id, [0] * 15)
            verified += 1
        figures.step()
    for _ in range(6):
        figures.step()
    each = (CPU.mixed(16) - CPU.decode(1)) / CPU.decode(1)
    assert before - ledger.loss_budget.level == pytest.approx(4 * each, abs=2)


def test_a_drained_pipeline_is_taken_out_of_the_purse_though_nothing_was_verified() -> None:
    """The token in flight contradicts the draft."""
    figures = Figures(
        Machine(GPU.decode, GPU.mixed, at_dispatch=False, host=0.004), [Scripted(lambda job, budget: None)]
    )
    figures.add(0, TEXTS[0])
    ledger = figures.speculation.ledger
    for _ in range(20):
        figures.step()
    before, drains = ledger.loss_budget.level, 5
    for _ in range(drains):
        (job,) = figures.scheduler.draftable_jobs
        while job.num_planned_outputs == job.num_generated:
            figures.step()
        figures.scheduler.set_drafts(job.id, [0] * 15)
        ledger.begin_excursion(pending=True)
        for _ in range(6):
            figures.step()
    assert figures.verified == 0
    assert ledger.switch_cost == pytest.approx(0.4, abs=0.25)
    assert before - ledger.loss_budget.level == pytest.approx(drains * ledger.switch_cost, abs=1)
