"""Turns go among clients: whose requests are many, large or urgent has no more than others that wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.desk import Desk

MANY = 2000
FIRST = 2**31 - 1
"""The highest priority that there is."""


def steps_until(desk: Desk, reached: Callable[[], bool], most: int) -> int:
    for count in range(most):
        if reached():
            return count
        desk.step()
    raise AssertionError(f"not within {most} steps")


@pytest.mark.parametrize("clients", [("a", "b"), (None, "b"), ("a", None)])
@pytest.mark.parametrize("priority", [0, FIRST])
def test_one_request_gets_the_next_row_before_thousands_of_another_client(
    clients: tuple[str | None, str | None], priority: int
) -> None:
    crowd, single = clients
    desk = Desk(max_rows=8)
    theirs = [desk.ask([i % 50] * 3, crowd, priority=priority) for i in range(MANY)]
    late = desk.ask([7] * 3, single)
    steps_until(desk, lambda: late.running, 50)
    assert sum(job.num_computed_tokens > 0 for job in theirs) <= 8 + 8, (
        "eight ran, and eight ended with the row that became free"
    )
    desk.scheduler.check_invariants()


def test_a_request_that_waits_for_memory_leaves_the_rest_to_other_clients() -> None:
    desk = Desk(blocks=100, max_rows=8)
    theirs = [desk.ask([i] * 600, "a") for i in range(8)]
    desk.step()
    late = desk.ask([7] * 3, "b")
    desk.step()
    assert late.running and [job.running for job in theirs] == [True] + [False] * 7
    own = desk.ask([8] * 3, "a", priority=-9)
    desk.step(2)
    assert not own.running, "priority and age order the requests of one client"
