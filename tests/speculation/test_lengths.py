"""Which drafted tokens a step verifies: the best of all choices."""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cortexmlx.speculation.speculation import choose_draft_lengths

ROW = st.lists(st.floats(0, 1), max_size=4).map(lambda each: list(accumulate(each, mul)))
COSTS = [*((each - 49) / 49 for each in (89, 116, 94, 106, 119, 119, 120)), *([2.2] * 7), 121 / 49]
"""What 1 .. 15 drafted tokens cost more than a decode step of one row, in decode steps, as measured on a CPU."""


def always(cost: float, certain: float) -> bool:
    return True


@given(
    st.lists(ROW, min_size=1, max_size=3),
    st.lists(st.floats(0, 3), min_size=1, max_size=12),
    st.floats(0, 0.5),
)
def test_no_other_choice_wins_more(chances: list[list[float]], costs: list[float], margin: float) -> None:
    def won(lengths: tuple[int, ...]) -> float:
        number = sum(lengths)
        expected = sum(sum(own[:k]) for own, k in zip(chances, lengths, strict=True))
        return expected - costs[number - 1] if 0 < number <= len(costs) else -9.0

    best = max(won(lengths) for lengths in product(*(range(len(own) + 1) for own in chances)))
    found = choose_draft_lengths(chances, costs, 1.0, margin, always)
    if found is None:
        assert best <= margin + 1e-9
    else:
        assert won(tuple(found)) == pytest.approx(best) and best > margin


def test_three_drafts_are_better_than_one_or_two_where_the_curve_says_so() -> None:
    assert choose_draft_lengths([[0.9, 0.4, 0.35]], COSTS[:3], 1.0, 0.0, always) == [3]
    assert choose_draft_lengths([[0.9, 0.4]], COSTS[:2], 1.0, 0.0, always) == [1]
    assert choose_draft_lengths([[0.95**k for k in range(1, 16)]], COSTS, 1.0, 0.0, always) == [15]
    assert choose_draft_lengths([[0.3, 0.1]], COSTS, 1.0, 0.0, always) is None


def test_what_may_not_be_lost_is_not_tried_but_certain_tokens_are() -> None:
    costs = [1.0, 2.0, 2.2]
    assert choose_draft_lengths([[0.9, 0.9, 0.9]], costs, 1.0, 0.0, lambda cost, certain: cost - certain <= 0) is None
    assert choose_draft_lengths([[1.0, 1.0, 1.0]], costs, 1.0, 0.0, lambda cost, certain: cost - certain <= 0) == [3]


def test_the_likeliest_tokens_of_all_rows_come_first() -> None:
    assert choose_draft_lengths([[0.5, 0.4], [], [0.95, 0.9, 0.3]], [0.1, 0.2, 0.9, 2.0, 3.0], 1.0, 0.0, always) == [
        0,
        0,
        2,
    ]
