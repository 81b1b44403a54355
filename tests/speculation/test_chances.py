"""How likely guesses are right."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from cortexmlx.scheduling.job import JobId
from cortexmlx.speculation.speculation import PRIOR, Chances, Ratio, streak_class

SOURCE, OTHER = ("suffix", 1), ("suffix", 2)
ONE, TWO = JobId(1), JobId(2)


def test_an_unknown_source_is_worth_little_at_first_and_more_after_right_tokens() -> None:
    chances = Chances().of(ONE, SOURCE, 5)
    assert chances[0] == pytest.approx(PRIOR[0])
    assert [after / before for before, after in pairwise(chances)] == pytest.approx([PRIOR[1]] * 3 + [PRIOR[2]])


def test_chances_become_those_of_the_source() -> None:
    chance = random.Random(1)
    known = Chances()
    for _ in range(600):
        known.note(ONE, SOURCE, chance.random() < 0.9)
    found = known.of(ONE, SOURCE, 16)
    assert found[0] == pytest.approx(0.9, abs=0.12)
    assert found[15] == pytest.approx(0.9**16, abs=0.2)
    assert known.of(ONE, OTHER, 1)[0] == pytest.approx(PRIOR[streak_class(known.streak(ONE))])


def test_a_row_that_fails_is_distrusted_before_the_others() -> None:
    known = Chances()
    for _ in range(100):
        known.note(TWO, SOURCE, True)
        known.note(ONE, SOURCE, True)
    for _ in range(6):
        known.note(ONE, SOURCE, False)
    assert known.of(ONE, SOURCE, 1)[0] < 0.25
    assert known.of(TWO, SOURCE, 1)[0] > 0.9


def test_a_new_row_begins_with_what_the_others_showed() -> None:
    known = Chances()
    for _ in range(50):
        known.note(ONE, SOURCE, False)
    assert known.of(TWO, SOURCE, 1)[0] < 0.05
    known.end(ONE)
    assert known.streak(ONE) == 0 and known.of(TWO, SOURCE, 1)[0] < 0.05


def test_the_first_token_after_a_gap_is_told_apart_from_one_that_follows_right_ones() -> None:
    known = Chances()
    for _ in range(40):
        known.no_guess(ONE)
        known.note(ONE, SOURCE, False)
        known.no_guess(ONE)
        for _ in range(10):
            known.note(ONE, SOURCE, True)
    known.no_guess(ONE)
    assert 0.3 < known.of(ONE, SOURCE, 1)[0] < 0.7
    known.note(ONE, SOURCE, True)
    assert known.of(ONE, SOURCE, 1)[0] > 0.9


def test_old_tokens_count_less() -> None:
    ratio = Ratio(10.0)
    for _ in range(1000):
        ratio.add(True)
    for _ in range(20):
        ratio.add(False)
    assert ratio.mean(0.5, 0.0) < 0.15
