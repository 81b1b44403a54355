"""The rule of two pipelines, judged by the mixed workloads that were measured on an M1."""

from __future__ import annotations

import pytest

from cortexmlx.metal.cost.cycles import Kind, cycles, cycles_beside, together

A, MUL, EXP, RCP, SHIFT, ADD64 = (
    Kind.ARITHMETIC,
    Kind.MULTIPLY,
    Kind.EXPONENT,
    Kind.RECIPROCAL,
    Kind.SHIFT,
    Kind.ADD64,
)

MEASURED = [
    ({A: 4}, 4.12),
    ({MUL: 1, A: 1}, 4.00),
    ({MUL: 1, A: 2}, 4.12),
    ({MUL: 1, A: 3}, 5.36),
    ({MUL: 1, A: 4}, 5.88),
    ({MUL: 2, A: 4}, 9.20),
    ({MUL: 3, A: 1}, 12.00),
    ({MUL: 3, A: 2}, 12.00),
    ({MUL: 1, SHIFT: 1}, 8.02),
    ({SHIFT: 1, Kind.CONVERT: 1, A: 2}, 8.02),
    ({Kind.CONVERT: 1, A: 2}, 4.06),
    ({EXP: 1, A: 1}, 4.02),
    ({EXP: 1, A: 2}, 4.08),
    ({EXP: 1, A: 3}, 5.20),
    ({EXP: 2}, 8.00),
    ({RCP: 1, A: 3}, 6.16),
    ({ADD64: 1, A: 3}, 7.36),
    ({ADD64: 1, MUL: 1}, 6.00),
    ({RCP: 1, MUL: 1}, 11.12),
    ({RCP: 1, EXP: 1, A: 2}, 8.76),
]
"""Instructions and measured cycles: philipturner/metal-benchmarks, "Mixed workload performance"."""

WORSE = [({EXP: 1, MUL: 1}, 9.94), ({ADD64: 2, A: 2}, 15.20)]
"""Mixtures that take longer than the rule says: a transcendental with a multiplication, pairs of 64-bit additions."""


@pytest.mark.parametrize(("work", "measured"), MEASURED)
def test_the_rule_gives_the_measured_mixtures(work: dict[Kind, float], measured: float) -> None:
    assert cycles(work) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("work", "measured"), WORSE)
def test_what_the_rule_does_not_explain_takes_at_most_a_third_longer(work: dict[Kind, float], measured: float) -> None:
    assert 1.15 < measured / cycles(work) < 1.34


def test_exchanges_among_lanes_keep_the_scheduler_busy() -> None:
    work = {Kind.REDUCTION: 2, A: 10, EXP: 3}
    assert cycles(work) == pytest.approx(2 * 14.54 + 10 + 6)
    assert cycles_beside(work) == pytest.approx(2 * 14.54)
    assert cycles_beside({**work, A: 100}) == pytest.approx(100 + 6)


def test_works_add_up_and_leave_out_what_is_not_there() -> None:
    assert together({A: 1.5, EXP: 0}, {A: 2, Kind.LOAD: 1}) == {A: 3.5, Kind.LOAD: 1}
