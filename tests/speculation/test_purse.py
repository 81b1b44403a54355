"""The purse: what can be lost within any number of tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.speculation.costs import BUDGET_CAP, BUDGET_CAP_STEPS, BUDGET_REFILL, LossBudget

STEPS = st.lists(
    st.tuples(st.floats(0, 90), st.floats(0, 1), st.integers(1, 40)),
    min_size=1,
    max_size=60,
)
"""Tries: what each loses at the worst, which part of that comes true, and its tokens. Below one half, it wins."""


@given(STEPS, st.lists(st.integers(1, 30)))
def test_within_any_tokens_no_more_is_lost_than_was_allowed(
    steps: list[tuple[float, float, int]], rows: list[int]
) -> None:
    purse = LossBudget()
    for each in rows:
        purse.cover(each)
    assert purse.cap == max([BUDGET_CAP, *(BUDGET_CAP_STEPS * each for each in rows)])
    lost: list[tuple[float, int]] = []
    for worst, truth, tokens in steps:
        if purse.allows(worst):
            purse.add_gain(-worst * (2 * truth - 1))
            lost.append((worst * (2 * truth - 1), tokens))
        else:
            lost.append((0.0, tokens))
        purse.refill(tokens)
        assert -1e-9 <= purse.level <= purse.cap
    for begin in range(len(lost)):
        window = lost[begin:]
        for end in range(1, len(window) + 1):
            sum_lost, tokens = (sum(each) for each in zip(*window[:end], strict=True))
            assert sum_lost <= purse.cap + BUDGET_REFILL * tokens + 1e-6


def test_a_thousand_tokens_lose_three_percent_at_most() -> None:
    assert BUDGET_CAP + 1000 * BUDGET_REFILL < 30


def test_an_empty_purse_allows_a_try_again_after_some_tokens() -> None:
    purse = LossBudget()
    purse.add_gain(-purse.level)
    assert not purse.allows(1.0)
    purse.refill(round(1.01 / BUDGET_REFILL))
    assert purse.allows(1.0) and not purse.allows(1.1)


def test_what_was_won_is_not_saved_without_end() -> None:
    purse = LossBudget()
    purse.add_gain(1000.0)
    assert purse.level == pytest.approx(BUDGET_CAP)
