"""How much a step may take after memory was refused, and when that is over."""

from __future__ import annotations

import pytest

from cortexmlx.scheduling.latency import MIN_PIECE
from cortexmlx.scheduling.shortage import MAX_STEPS, STEPS_TO_RELAX, Backoff, RefusalRetry


def good_steps(backoff: Backoff, count: int) -> int:
    """How many of so many good steps let the next one have more."""
    return sum(backoff.relax() for _ in range(count))


def test_nothing_is_held_back_before_a_refusal() -> None:
    backoff = Backoff(16, 512)
    assert not backoff.holds_back
    assert good_steps(backoff, 1_000) == 0
    assert (backoff.rows, backoff.tokens) == (16, 512)


def test_a_refusal_leaves_so_many_rows_and_half_of_the_tokens_but_one_row_and_a_piece() -> None:
    backoff = Backoff(16, 512)
    seen = []
    for rows in (5, 9, 2, 0):
        backoff.tighten(rows)
        seen.append((backoff.rows, backoff.tokens))
    assert seen == [(5, 256), (5, 128), (2, 64), (1, 32)]
    for _ in range(5):
        backoff.tighten(0)
    assert (backoff.rows, backoff.tokens) == (1, MIN_PIECE)
    assert backoff.holds_back


@pytest.mark.parametrize("budget", [1, 5, MIN_PIECE])
def test_a_budget_below_a_piece_stays(budget: int) -> None:
    backoff = Backoff(2, budget)
    backoff.tighten(0)
    assert backoff.tokens == budget


def test_good_steps_in_a_row_double_it_until_nothing_is_held_back() -> None:
    backoff = Backoff(6, 100)
    backoff.tighten(2)
    assert good_steps(backoff, STEPS_TO_RELAX - 1) == 0
    backoff.tighten(1)
    assert good_steps(backoff, STEPS_TO_RELAX - 1) == 0, "a refusal begins the count again"
    assert backoff.relax() and (backoff.rows, backoff.tokens) == (2, 50)
    assert good_steps(backoff, 10 * STEPS_TO_RELAX) == 2
    assert (backoff.rows, backoff.tokens) == (6, 100) and not backoff.holds_back


def test_growth_that_was_refused_is_asked_for_again_ever_more_seldom_and_for_ever() -> None:
    retry, waits = RefusalRetry(), []
    assert not any(retry.note_good_step() for _ in range(1_000)), "nothing was refused"
    for _ in range(10):
        retry.note_refusal()
        waits.append(next(step for step in range(1, 10**6) if retry.note_good_step()))
    assert waits[:3] == [STEPS_TO_RELAX, 2 * STEPS_TO_RELAX, 4 * STEPS_TO_RELAX] and waits[-1] == MAX_STEPS
    assert not any(retry.note_good_step() for _ in range(2 * MAX_STEPS))
    retry.note_refusal()
    assert next(step for step in range(1, 10**6) if retry.note_good_step()) == STEPS_TO_RELAX, (
        "it was not refused for long"
    )
