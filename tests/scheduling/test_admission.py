"""Admission: nobody's requests keep others from an empty row, and nobody is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cortexmlx.scheduling.fair_share import QUANTUM
from cortexmlx.scheduling.job import Job
from support.scheduling.desk import Desk

CROWD = 450


def beyond_its_share(desk: Desk) -> None:
    for i in range(CROWD):
        desk.ask([i % 50] * 20, "a")


def behind_a_prefix(desk: Desk) -> None:
    for i in range(CROWD):
        desk.ask([*[1] * 600, i % 50], "a")


def behind_a_parent(desk: Desk) -> None:
    parent = desk.ask([1] * 600, "a")
    for _ in range(CROWD):
        desk.ask([1] * 600, "a", fork_of=parent)


CROWDS = (beyond_its_share, behind_a_prefix, behind_a_parent)


@pytest.mark.parametrize(("crowd", "client"), zip(CROWDS, ["b", None, "b"], strict=True))
def test_nobody_waits_for_anothers_crowd_while_rows_are_empty(crowd: Callable[[Desk], None], client: str) -> None:
    desk = Desk(client_tokens=70 if crowd is beyond_its_share else None)
    crowd(desk)
    desk.step()
    late = desk.ask([7] * 9, client)
    desk.step()
    assert late.is_running
    assert desk.scheduler.rows_running == 2, "the crowd waits, but for its first"
    desk.scheduler.check_invariants()


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_step_looks_at_few_however_many_wait(crowd: Callable[[Desk], None], monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(client_tokens=70 if crowd is beyond_its_share else None)
    crowd(desk)
    looks: list[Job] = []
    match = desk.scheduler._running_set.match
    monkeypatch.setattr(desk.scheduler._running_set, "match", lambda job: (looks.append(job), match(job))[1])
    for _ in range(12):
        looks.clear()
        desk.step()
        assert len(looks) <= 400 < CROWD


def test_thousands_of_clients_are_served_in_order() -> None:
    desk = Desk(client_tokens=70)
    jobs = [desk.ask([1] * 20, f"client {i // 2}") for i in range(600)]
    desk.step()
    assert [job.is_running for job in jobs[:40]] == [i % 2 == 0 and i < 32 for i in range(40)]
    desk.scheduler.check_invariants()


@pytest.mark.parametrize("crowd", CROWDS)
def test_everybody_can_be_cancelled_and_leaves_nothing_behind(crowd: Callable[[Desk], None]) -> None:
    desk = Desk(client_tokens=70 if crowd is beyond_its_share else None)
    crowd(desk)
    desk.step(2)
    jobs = desk.scheduler.jobs
    assert list(jobs[1:]) == sorted(jobs[1:], key=lambda j: j.order) and len(jobs) == desk.scheduler.rows_waiting + 1
    for i, job in enumerate(reversed(jobs)):
        desk.cancel(job)
        if i % 300 == 0:
            desk.scheduler.check_invariants()
    assert desk.scheduler.is_idle and not desk.scheduler.rows_waiting
    desk.scheduler.check_invariants()


def test_forks_go_on_when_their_parent_is_cancelled_while_it_waits() -> None:
    desk = Desk(max_rows=1)
    first = desk.ask([3] * 9)
    parent = desk.ask([1] * 20)
    fork = desk.ask([1] * 20, fork_of=parent)
    desk.step()
    desk.cancel(parent)
    desk.cancel(first)
    desk.step(2)
    assert fork.is_running
    desk.scheduler.check_invariants()


# -- Turns go among clients: whose requests are many, large or urgent has no more than others that wait ---------------


MANY = 500
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
    steps_until(desk, lambda: late.is_running, 50)
    assert sum(job.start_number > 0 for job in theirs) <= 8 + 8, (
        "eight ran, and eight ended with the row that became free"
    )
    desk.scheduler.check_invariants()


def test_a_request_that_waits_for_memory_leaves_the_rest_to_other_clients() -> None:
    desk = Desk(blocks=100, max_rows=8)
    theirs = [desk.ask([i] * 600, "a") for i in range(8)]
    desk.step()
    late = desk.ask([7] * 3, "b")
    desk.step()
    assert late.is_running and [job.is_running for job in theirs] == [True] + [False] * 7
    own = desk.ask([8] * 3, "a", priority=-9)
    desk.step(2)
    assert not own.start_number, "priority and age order the requests of one client"


def test_made_up_clients_whose_requests_do_not_fit_hide_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them are looked up in the prefix cache, which takes time; of the others their length is enough."""
    desk = Desk(blocks=100, max_rows=8)
    desk.ask([0] * 600, "first")
    desk.step()
    theirs = [desk.ask([i] * 600, f"made up {i}") for i in range(500)]
    late = desk.ask([7] * 3, "b")
    looks: list[Job] = []
    match = desk.scheduler._running_set.match
    monkeypatch.setattr(desk.scheduler._running_set, "match", lambda job: (looks.append(job), match(job))[1])
    desk.step()
    assert late.is_running and not any(job.is_running for job in theirs)
    assert len(looks) <= 2 * 17, "for the one who begins, and for nobody else then"
    desk.scheduler.check_invariants()


@pytest.mark.parametrize("clients", [1, 5])
def test_a_stream_of_small_requests_does_not_starve_a_large_one_of_another_client(clients: int) -> None:
    """They may pass until each of them has had as many tokens more as it needs."""
    desk = Desk(blocks=100, max_rows=8)
    small: list[Job] = []

    def crowd() -> None:
        while desk.scheduler.rows_waiting < 20:
            number = len(small)
            small.append(desk.ask([number % 50] * 7, f"b{number % clients}", max_tokens=20 + number * 7 % 20))

    crowd()
    desk.step()
    begun = sum(job.start_number > 0 for job in small)
    large = desk.ask([7] * 700, "a")
    while not large.start_number:
        desk.step()
        crowd()
        assert len(small) < 2000
    passed = sum(job.start_number > 0 for job in small) - begun
    least, most = 7 + 20, 7 + 40
    assert least * passed <= clients * (700 + 40 + QUANTUM + 2 * most) + 8 * most
    assert passed > 8, "they were not kept from the memory that was free"


def test_cached_tokens_and_other_answers_cost_nothing() -> None:
    desk = Desk(max_rows=8)
    desk.ask([3] * 400, "b", max_tokens=4000)
    desk.ask([1] * 400, "a", max_tokens=1)
    desk.step(40)
    before = desk.turns.now
    parent = desk.ask([1] * 400, "a", max_tokens=10)
    fork = desk.ask([1] * 400, "a", max_tokens=10, fork_of=parent)
    desk.step(2)
    assert parent.cached == 399 and fork.is_running
    assert desk.tokens("a") <= before + QUANTUM + 401 + 2 * (1 + 10)


def test_who_waits_for_a_prefix_or_a_parent_spends_no_turn_and_loses_none() -> None:
    desk = Desk(max_rows=4, share_between_clients=True)
    owner = desk.ask([1] * 2000, "a")
    desk.step()
    same, fork = desk.ask([1] * 2000, "b"), desk.ask([1] * 2000, "a", fork_of=owner)
    desk.step()
    assert not same.start_number and not fork.start_number
    place = desk.turns.place("b")
    for i in range(20):
        desk.ask([i] * 9, "c")
    while not same.start_number:
        assert desk.turns.place("b") == place
        desk.step()
    assert same.cached >= 1900


def test_a_preempted_request_comes_before_new_clients() -> None:
    desk = Desk(max_rows=1)
    job = desk.ask([1] * 9, "a", max_tokens=300)
    desk.step(3)
    desk.ask([2] * 9, "b")
    desk.scheduler.restart_rows()
    desk.step()
    assert job.is_running


def test_thousands_of_clients_with_a_request_each_leave_nothing_behind() -> None:
    desk = Desk(max_rows=16)
    jobs = [desk.ask([i % 50] * 5, f"client {i}", max_tokens=3) for i in range(400)]
    most = 0
    while not desk.scheduler.is_idle:
        desk.step()
        waiting = {job.client for job in desk.scheduler.jobs}
        most = max(most, len(desk.turns) - len(waiting))
    turns = [job.start_number for job in jobs]
    assert turns == sorted(turns) and len(desk.turns) == 0
    assert most <= 2 * 16, "accounts of those that have ended"


def test_a_new_name_for_each_request_does_not_keep_others_waiting_for_ever() -> None:
    desk = Desk(max_rows=4)
    own = [desk.ask([1] * 40, "a") for _ in range(30)]
    names = 0
    while not all(job.finish_reason for job in own):
        while desk.scheduler.rows_waiting < 40:
            names += 1
            desk.ask([2] * 4, f"new {names}", max_tokens=4)
        desk.step()
        assert names < 6000
        assert len(desk.turns) <= desk.scheduler.rows_waiting + 4 + 200
    desk.scheduler.check_invariants()


@pytest.mark.parametrize(("mine", "theirs"), [(1, 7), (3, 4)])
@pytest.mark.parametrize("begun_last", [False, True])
def test_the_client_with_the_most_tokens_gives_up_a_row_first(mine: int, theirs: int, begun_last: bool) -> None:
    """Whatever priority it says that they have, and whoever began last."""
    desk = Desk(blocks=40, max_rows=8, headroom=0)
    large = [] if begun_last else [desk.ask([i] * 30, "a", max_tokens=60, priority=FIRST) for i in range(theirs)]
    small = [desk.ask([i] * 8, "b", max_tokens=6) for i in range(mine)]
    large = large or [desk.ask([i] * 30, "a", max_tokens=60, priority=FIRST) for i in range(theirs)]
    desk.step()
    assert all(job.is_running for job in small + large)
    desk.drain()
    assert not any(job.preemptions for job in small) and any(job.preemptions for job in large)


def test_the_row_that_began_last_goes_if_every_client_has_one() -> None:
    desk = Desk(blocks=20, max_rows=3, headroom=0)
    jobs = [desk.ask([i] * 30, client, max_tokens=100, priority=i) for i, client in enumerate("abc")]
    desk.drain()
    assert jobs[0].preemptions == 0 < jobs[2].preemptions
    assert [job.num_generated for job in jobs] == [100] * 3
