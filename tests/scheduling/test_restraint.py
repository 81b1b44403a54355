"""How much a step may take after memory was refused, and when that is over."""

from __future__ import annotations

import pytest

from cortexmlx.scheduling.latency import LEAST_PIECE
from cortexmlx.scheduling.restraint import STEPS_TO_RELAX, Restraint


def good_steps(restraint: Restraint, count: int) -> int:
    """How many of so many good steps let the next one have more."""
    return sum(restraint.relax() for _ in range(count))


def test_nothing_is_held_back_before_a_refusal() -> None:
    restraint = Restraint(16, 512)
    assert not restraint.holds_back
    assert good_steps(restraint, 1_000) == 0
    assert (restraint.rows, restraint.tokens) == (16, 512)


def test_a_refusal_leaves_so_many_rows_and_half_of_the_tokens_but_one_row_and_a_piece() -> None:
    restraint = Restraint(16, 512)
    seen = []
    for rows in (5, 9, 2, 0):
        restraint.tighten(rows)
        seen.append((restraint.rows, restraint.tokens))
    assert seen == [(5, 256), (5, 128), (2, 64), (1, 32)]
    for _ in range(5):
        restraint.tighten(0)
    assert (restraint.rows, restraint.tokens) == (1, LEAST_PIECE)
    assert restraint.holds_back


@pytest.mark.parametrize("budget", [1, 5, LEAST_PIECE])
def test_a_budget_below_a_piece_stays(budget: int) -> None:
    restraint = Restraint(2, budget)
    restraint.tighten(0)
    assert restraint.tokens == budget


def test_good_steps_in_a_row_double_it_until_nothing_is_held_back() -> None:
    restraint = Restraint(6, 100)
    restraint.tighten(2)
    assert good_steps(restraint, STEPS_TO_RELAX - 1) == 0
    restraint.tighten(1)
    assert good_steps(restraint, STEPS_TO_RELAX - 1) == 0, "a refusal begins the count again"
    assert restraint.relax() and (restraint.rows, restraint.tokens) == (2, 50)
    assert good_steps(restraint, 10 * STEPS_TO_RELAX) == 2
    assert (restraint.rows, restraint.tokens) == (6, 100) and not restraint.holds_back
