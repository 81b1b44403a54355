"""What is measured are the messages and steps of a real scheduler."""

from __future__ import annotations

import pytest

from cortexmlx.bench.studies.hosts import wire
from cortexmlx.scheduling.steps.plan import StepKind


def test_the_plans_are_one_of_each_kind() -> None:
    mixed, first, before, plan = wire.Steps(rows=3, context=96).plans()
    assert mixed.kind is StepKind.MIXED and len(mixed.segments) == 3 and len(mixed.positions) > 3
    assert first.kind is StepKind.DECODE and first.groups is not None and first.flush is not None
    assert (before.column, plan.column, plan.groups) == (1, 2, None)


def test_ranks_that_sleep_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "ROWS", 2)
    monkeypatch.setattr(wire, "CONTEXT", 40)
    cost = wire.steps_cost(ranks=2, windows=1)
    assert cost.alone >= 0.9 * wire.STEP and cost.seconds >= 0.9 * wire.STEP and cost.build > 0
    table = wire.report([wire.MessageCost("step", 17, 3.0, 5.0, 7.0)], [cost])
    assert "| step | 17 | 3 | 5 | 7 | 0.07 |" in table and "| 2 | " in table
