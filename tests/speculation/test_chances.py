"""How likely guesses are right."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from cortexmlx.scheduling.job import JobId
from cortexmlx.speculation.speculation import PRIOR, AcceptanceRates, DecayingRate, streak_class

SOURCE, OTHER = ("suffix", 1), ("suffix", 2)
ONE, TWO = JobId(1), JobId(2)


def test_an_unknown_source_is_worth_little_at_first_and_more_after_right_tokens() -> None:
    chances = AcceptanceRates().estimate(ONE, SOURCE, 5)
    assert chances[0] == pytest.approx(PRIOR[0])
    assert [after / before for before, after in pairwise(chances)] == pytest.approx([PRIOR[1]] * 3 + [PRIOR[2]])


def test_chances_become_those_of_the_source() -> None:
    known, dice = AcceptanceRates(), random.Random(1)
    for _ in range(600):
        known.record(ONE, SOURCE, dice.random() < 0.9)
    found = known.estimate(ONE, SOURCE, 16)
    assert found[0] == pytest.approx(0.9, abs=0.12)
    assert found[15] == pytest.approx(0.9**16, abs=0.2)
    assert known.estimate(ONE, OTHER, 1)[0] == pytest.approx(PRIOR[streak_class(known.streak(ONE))])


def test_a_row_that_fails_is_distrusted_before_the_others() -> None:
    known = AcceptanceRates()
    for _ in range(100):
        known.record(TWO, SOURCE, True)
        known.record(ONE, SOURCE, True)
    for _ in range(6):
        known.record(ONE, SOURCE, False)
    assert known.estimate(ONE, SOURCE, 1)[0] < 0.25
    assert known.estimate(TWO, SOURCE, 1)[0] > 0.9


def test_a_new_row_begins_with_what_the_others_showed() -> None:
    known = AcceptanceRates()
    for _ in range(50):
        known.record(ONE, SOURCE, False)
    assert known.estimate(TWO, SOURCE, 1)[0] < 0.05
    known.forget_row(ONE)
    assert known.streak(ONE) == 0 and known.estimate(TWO, SOURCE, 1)[0] < 0.05


def test_the_first_token_after_a_gap_is_told_apart_from_one_that_follows_right_ones() -> None:
    known = AcceptanceRates()
    for _ in range(40):
        known.reset_streak(ONE)
        for is_right in [False] + [True] * 10:
            known.record(ONE, SOURCE, is_right)
    known.reset_streak(ONE)
    assert 0.3 < known.estimate(ONE, SOURCE, 1)[0] < 0.7
    known.record(ONE, SOURCE, True)
    assert known.estimate(ONE, SOURCE, 1)[0] > 0.9


def test_a_head_is_known_by_the_place_in_its_guess_and_not_by_the_streak() -> None:
    known = AcceptanceRates()
    for place in (0, 1) * 200:
        known.record(ONE, SOURCE, place == 0, place, keep_streak=True)
    assert known.estimate(ONE, SOURCE, 2, place=0) == pytest.approx([1, 0], abs=0.1)


def test_old_tokens_count_less() -> None:
    ratio = DecayingRate(10.0)
    for is_right in [True] * 1000 + [False] * 20:
        ratio.add(is_right)
    assert ratio.mean(0.5, 0.0) < 0.15
