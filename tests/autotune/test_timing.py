"""Candidates are timed in turns, within bounds of runs and seconds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.autotune.job import CannotServe
from cortexmlx.autotune.timing import (
    FEWEST_ROUNDS,
    HOPELESS,
    ROUNDS,
    BudgetSpent,
    Timing,
    TimingBudget,
    time_candidates,
)
from support.scripted_choice import Clock

A_LONG_TIME = 1000.0


def budget(clock: Clock, seconds: float = A_LONG_TIME, runs: int = 1000) -> TimingBudget:
    return TimingBudget(seconds, runs, clock=clock)


def test_the_median_counts_not_the_first_run_nor_one_that_was_disturbed() -> None:
    clock = Clock()
    steady = clock.candidate("steady", 2.0)
    spiky = clock.candidate("spiky", 1.0, 50.0, 1.0, 1.0, 1.0, first=90.0, ahead=7.0)
    assert time_candidates([steady, spiky], budget(clock)) == Timing({"steady": 2.0, "spiky": 1.0}, {})


def test_candidates_take_turns_and_begin_in_turns() -> None:
    clock = Clock()
    time_candidates([clock.candidate("a", 1.0), clock.candidate("b", 1.0)], budget(clock))
    assert clock.runs == ["a", "b", *"abbaabbaab"]


def test_a_run_that_computes_the_job_several_times_counts_for_one_of_them() -> None:
    clock = Clock()
    found = time_candidates([clock.candidate("eight", 4.0, times=8), clock.candidate("one", 1.0)], budget(clock))
    assert found == Timing({"eight": 0.5, "one": 1.0}, {})


def test_what_raises_cannot_serve_and_the_others_are_timed() -> None:
    clock = Clock()
    candidates = [
        clock.candidate("checked", 1.0, error=CannotServe("it differs by 0.3")),
        clock.candidate("good", 1.0),
        clock.candidate("bad", 1.0, error=RuntimeError("\n  [metal] no such function\nsecond line")),
        clock.candidate("silent", 1.0, error=ValueError()),
    ]
    found = time_candidates(candidates, budget(clock))
    assert found is not None and found.seconds == {"good": 1.0}
    assert found.refused == {
        "checked": "it differs by 0.3",
        "bad": "RuntimeError: [metal] no such function",
        "silent": "ValueError: ",
    }
    assert Counter(clock.runs) == {"checked": 1, "bad": 1, "silent": 1, "good": ROUNDS + 1}


def test_an_interrupt_is_no_refusal() -> None:
    clock = Clock()
    with pytest.raises(KeyboardInterrupt):
        time_candidates([clock.candidate("a", 1.0, error=KeyboardInterrupt())], budget(clock))  # type: ignore[arg-type]


def test_a_hopeless_candidate_is_run_twice_only() -> None:
    clock = Clock()
    found = time_candidates([clock.candidate("fast", 1.0), clock.candidate("slow", HOPELESS + 0.25)], budget(clock))
    assert found == Timing({"fast": 1.0, "slow": HOPELESS + 0.25}, {})
    assert Counter(clock.runs) == {"fast": ROUNDS + 1, "slow": 2}


def test_nothing_is_known_if_the_budget_ends_too_early() -> None:
    for runs in range(2 + 2 * FEWEST_ROUNDS):
        clock = Clock()
        assert time_candidates([clock.candidate("a", 1.0), clock.candidate("b", 1.5)], budget(clock, runs=runs)) is None
        assert len(clock.runs) == runs
    clock = Clock()
    found = time_candidates(
        [clock.candidate("a", 1.0), clock.candidate("b", 1.5)], budget(clock, runs=2 + 2 * FEWEST_ROUNDS)
    )
    assert found == Timing({"a": 1.0, "b": 1.5}, {})


def test_a_budget_that_ends_among_first_runs_says_nothing_of_the_others() -> None:
    clock = Clock()
    candidates = [clock.candidate("a", 1.0), clock.candidate("no", 1.0, error=CannotServe("no"))]
    assert time_candidates([*candidates, clock.candidate("b", 1.0)], budget(clock, runs=2)) is None


def test_no_run_begins_while_somebody_waits() -> None:
    clock = Clock()
    waiting = TimingBudget(A_LONG_TIME, 1000, has_waiting=lambda: len(clock.runs) >= 3, clock=clock)
    assert time_candidates([clock.candidate("a", 1.0), clock.candidate("b", 1.0)], waiting) is None
    assert len(clock.runs) == 3


def test_no_run_begins_that_would_end_too_late() -> None:
    clock = Clock()
    limited = budget(clock, seconds=10.0)
    slow = clock.candidate("slow", 4.0)
    assert [limited.run(slow, expected) for expected in (None, 4.0)] == [4.0, 4.0]
    with pytest.raises(BudgetSpent):
        limited.run(slow, 4.0)
    with pytest.raises(BudgetSpent):  # the longest so far took four seconds, and two are left
        limited.run(clock.candidate("unknown", 1.0))
    assert limited.run(clock.candidate("known to be short", 1.0), 1.0) == 1.0
    assert clock.now == 9.0


@given(
    st.lists(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8), min_size=1, max_size=5),
    st.floats(0.0, 30.0),
    st.integers(0, 40),
)
def test_time_and_runs_are_bounded_whatever_candidates_take(
    scripts: list[list[float]], seconds: float, runs: int
) -> None:
    """At the end one run at most is longer than what was expected of it."""
    clock = Clock()
    candidates = [clock.candidate(str(number), *script) for number, script in enumerate(scripts)]
    found = time_candidates(candidates, budget(clock, seconds, runs))
    longest = max(time for script in scripts for time in script)
    assert len(clock.runs) <= min(runs, len(scripts) * (ROUNDS + 1))
    assert clock.now <= seconds + longest + 1e-9
    if found is not None:
        assert found.seconds.keys() == {candidate.name for candidate in candidates}
        assert all(min(scripts[int(n)]) - 1e-9 <= s <= max(scripts[int(n)]) + 1e-9 for n, s in found.seconds.items())
