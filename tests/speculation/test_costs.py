"""What steps cost: learned online, not a straight line, and not moved by one slow step."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.speculation.costs import FIRST, FIRST_OF_ROW, OPTIMISM, PRIOR_SLOPE, StepCosts, round_to_bucket

CURVE = {1: 53, 2: 89, 3: 116, 4: 94, 6: 119, 8: 120, 12: 152, 16: 170}
"""Milliseconds of steps by tokens, as measured on a CPU."""


def learned(noise: float = 0.0, seed: int = 0) -> StepCosts:
    """A row that decodes in 49 ms, and all of the curve, measured now and then in any order."""
    chance = random.Random(seed)
    costs = StepCosts()

    def slow() -> float:
        return 1 + noise * chance.expovariate(1) + (9 if chance.random() < noise / 5 else 0)

    for _ in range(40):
        costs.record_decode(1, 0.049 * slow())
        tokens = chance.choice([t for t in CURVE if t > 1])
        costs.record_verify(1, tokens, CURVE[tokens] / 1000 * slow())
    for tokens in CURVE:
        for _ in range(9 if tokens > 1 else 0):
            costs.record_verify(1, tokens, CURVE[tokens] / 1000 * slow())
            costs.record_decode(1, 0.049 * slow())
    return costs


def times(costs: StepCosts, rows: int = 1, drafted: int = 15) -> list[float]:
    decode = costs.decode_time(rows)
    assert decode is not None
    return [time / decode for time in costs.verify_times(rows, drafted, decode)]


@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_that_of_the_machine_also_where_it_falls(seed: int) -> None:
    for noise, off in ((0.0, 0.001), (0.15, 0.25)):
        found = times(learned(noise, seed))
        for tokens in (2, 3, 4, 6, 8, 12, 16):
            assert found[tokens - 2] == pytest.approx(CURVE[tokens] / 49, rel=off)
    exact = times(learned())
    assert exact[2] < exact[1], "four tokens cost less than three"


def test_what_was_not_measured_is_guessed_between_its_neighbours_and_is_a_little_cheap() -> None:
    assert times(learned())[3] == pytest.approx(OPTIMISM * (94 + 119) / 2 / 49, rel=0.01)


def test_a_machine_that_slows_down_as_a_whole_changes_no_decision() -> None:
    costs = learned()
    before = times(costs)
    for _ in range(20):
        costs.record_verify(1, 16, 3 * 0.170)
        costs.record_decode(1, 3 * 0.049)
    after, decode = times(costs), costs.decode_time(1)
    assert after == pytest.approx(before, rel=0.15)
    assert decode is not None and decode * costs.unit == pytest.approx(3 * 0.049, rel=0.2)


def test_what_really_costs_more_is_learned() -> None:
    costs = learned()
    for _ in range(30):
        costs.record_verify(1, 16, 0.340)
        costs.record_decode(1, 0.049)
    assert times(costs)[14] == pytest.approx(340 / 49, rel=0.1)
    assert times(costs)[6] == pytest.approx(120 / 49, rel=0.25), "until it is measured again"


def test_one_bad_measurement_is_forgotten_and_tried_again() -> None:
    costs = StepCosts()
    costs.record_decode(1, 0.05)
    costs.record_verify(1, 8, 5.0)
    assert times(costs)[6] > 20
    for _ in range(310):
        costs.record_decode(1, 0.05)
    assert times(costs) == pytest.approx([1 + more * PRIOR_SLOPE for more in range(1, FIRST + 1)])


def test_a_decode_step_with_the_draft_head_has_a_price_of_its_own() -> None:
    costs = StepCosts()
    costs.record_decode(8, 0.03, head_ran=True)
    assert costs.decode_time(8) == costs.decode_time(8, head_ran=True), "as long as no other is known"
    costs.record_decode(8, 0.024)
    with_head, without = costs.decode_time(8, head_ran=True), costs.decode_time(8)
    assert with_head is not None and without is not None and without == pytest.approx(0.8 * with_head)


def test_rows_have_their_own_costs_and_begin_with_those_of_others() -> None:
    costs = learned()
    costs.record_decode(4, 0.07)
    assert costs.decode_time(3) is None
    assert times(costs, rows=4, drafted=12)[11] == pytest.approx(170 / 70, rel=0.01)
    costs.record_verify(4, 16, 0.3)
    assert times(costs, rows=4, drafted=12)[11] == pytest.approx(300 / 70, rel=0.2)
    assert times(costs)[14] == pytest.approx(170 / 49, rel=0.1)


@given(st.dictionaries(st.integers(2, 100), st.floats(1e-4, 10), max_size=8), st.integers(1, 16))
def test_guesses_are_positive_and_go_not_far_beyond_what_was_measured(points: dict[int, float], rows: int) -> None:
    costs = StepCosts()
    costs.record_decode(rows, 0.05)
    for tokens, seconds in points.items():
        costs.record_verify(rows, tokens, seconds)
    found = times(costs, rows, 64)
    measured = max((round_to_bucket(tokens) for tokens in points if tokens > rows), default=rows)
    assert len(found) == min(64, max(FIRST, FIRST_OF_ROW * rows, 2 * (measured - rows))) and min(found) >= 0.5


@given(st.integers(1, 5000))
def test_small_numbers_have_an_estimate_of_their_own_and_large_ones_share(count: int) -> None:
    assert round_to_bucket(count) == count if count <= 32 else 0.87 * count < round_to_bucket(count) <= count
    assert round_to_bucket(round_to_bucket(count)) == round_to_bucket(count)
