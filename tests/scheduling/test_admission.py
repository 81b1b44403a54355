"""Admission: nobody's requests keep others from an empty row, and nobody is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
