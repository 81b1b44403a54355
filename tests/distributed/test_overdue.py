"""A rank that hangs is found by what calls alike took before, and a slow one is never taken for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.distributed.messages import (
    AnyCall,
    Begin,
    Choose,
    Collect,
    Copy,
    Dispatch,
    Forward,
    MakeRunner,
    Open,
    Prepare,
    RankOptions,
    Resize,
    SentPlan,
    Trim,
    to_sent_plan,
)
from cortexmlx.distributed.overdue import (
    HANG_FACTOR,
    MIN_SAMPLES,
    PAUSE_SECONDS,
    HangDetector,
    HangLimits,
    OverdueCall,
    step_work,
)
from cortexmlx.scheduling.job import JobId
from cortexmlx.scheduling.plan import Segment, StepKind, StepPlan

LIMITS = HangLimits(seconds=7.0, first_seconds=300.0)
LOOK = 0.5


def plan_of(*pieces: tuple[int, int]) -> SentPlan:
    """A plan whose segments have so many tokens from a position: `(count, first)`."""
    none = np.zeros(0, np.int32)
    segments = tuple(Segment(JobId(n), 0, first, count) for n, (count, first) in enumerate(pieces))
    plan = StepPlan(0, StepKind.MIXED, segments, none, None, none, none, (), none, None, None, (), 0, 0, (1,), None)
    return to_sent_plan(plan)


DECODE = Dispatch(plan_of((1, 0)))
PIECE = Dispatch(plan_of((512, 0)))


class Story:
    """Calls to some ranks, at times that the test makes."""

    def __init__(self, ranks: int = 2, limits: HangLimits = LIMITS) -> None:
        self.calls = HangDetector(ranks, limits)
        self.now = 1000.0
        self.ranks = range(ranks)
        self.number = 0
        self.used: list[float | None] = [0.0] * ranks

    def send(self, asks: AnyCall) -> None:
        self.number += 1
        for rank in self.ranks:
            self.calls.note_call(rank, self.number, asks, self.now)

    def wait(self, seconds: float, often: bool = False) -> OverdueCall | None:
        """Look for so long, some times or as often as in earnest. What was found first."""
        until, step = self.now + seconds, LOOK if often else max(LOOK, seconds / 40)
        while self.now < until:
            self.now = min(until, self.now + step)
            if (found := self.calls.find_overdue(self.now, self.used)) is not None:
                return found
        return None

    def answer(self, *ranks: int) -> None:
        for rank in ranks or self.ranks:
            self.calls.note_answer(rank, self.now)

    def took(self, asks: AnyCall, seconds: float, times: int = 1) -> None:
        for _ in range(times):
            self.send(asks)
            assert self.wait(seconds) is None
            self.answer()

    def found_after(self, asks: AnyCall) -> float:
        """After how many seconds a call that is never answered is overdue."""
        self.send(asks)
        began = self.now
        assert self.wait(1e5, often=True) is not None
        return self.now - began


def test_a_call_is_overdue_soon_if_calls_alike_are_quick() -> None:
    story = Story()
    story.took(DECODE, 0.05, MIN_SAMPLES)
    assert LIMITS.seconds < story.found_after(DECODE) <= LIMITS.seconds + 2 * LOOK < 10.0


def test_a_machine_that_is_slow_has_more_time() -> None:
    story = Story()
    story.took(PIECE, 20.0, MIN_SAMPLES)
    assert 20.0 * HANG_FACTOR < story.found_after(PIECE) <= 20.0 * HANG_FACTOR + 2 * LOOK


@pytest.mark.parametrize("asks", [DECODE, PIECE, MakeRunner(()), Trim(), Prepare(plan_of((1, 0)))])
def test_what_was_never_seen_may_take_long(asks: AnyCall) -> None:
    story = Story()
    story.took(DECODE, 0.01, MIN_SAMPLES - 1)
    assert story.found_after(asks) > LIMITS.first_seconds


def test_to_open_a_part_may_take_any_time() -> None:
    story = Story()
    story.send(Open(RankOptions("m", None, False, None, None, 8, "auto", False, 4, 32)))
    assert story.wait(1e5) is None


@pytest.mark.parametrize(
    "asks",
    [
        Resize((9,)),
        Begin((9,)),
        Copy(()),
        Prepare(msgspec.structs.replace(plan_of((1, 0)), blocks=(9,))),
    ],
)
def test_what_moves_or_allocates_much_may_take_long_however_quick_it_was(asks: AnyCall) -> None:
    """On a full machine, the system makes room first."""
    story = Story()
    for small in (Trim(), Resize((1,)), Prepare(plan_of((1, 0))), DECODE):
        story.took(small, 0.001, MIN_SAMPLES + 1)
    assert story.found_after(asks) > LIMITS.first_seconds


def test_what_moves_nothing_is_a_kind_of_its_own() -> None:
    story = Story()
    story.took(Prepare(plan_of((1, 0))), 0.001, MIN_SAMPLES + 1)
    assert story.found_after(Prepare(plan_of((7, 100)))) < 8.5


def test_steps_with_more_work_say_what_smaller_ones_may_take_and_not_the_other_way_round() -> None:
    story = Story()
    story.took(DECODE, 40.0, MIN_SAMPLES)
    assert story.found_after(PIECE) > 40.0 * HANG_FACTOR > LIMITS.first_seconds
    story = Story()
    story.took(PIECE, 1.0, MIN_SAMPLES)
    assert LIMITS.seconds < 1.0 * HANG_FACTOR < story.found_after(Dispatch(plan_of((200, 0)))) < 1.5 * HANG_FACTOR


def test_all_calls_of_a_step_are_of_its_kind() -> None:
    for asks in (Collect(True), Choose(None), Forward(None), Forward(plan_of((600, 0)))):
        story = Story()
        story.took(PIECE, 0.1, MIN_SAMPLES)
        assert story.found_after(asks) < 8.5, asks
    story = Story()
    story.took(PIECE, 0.1, MIN_SAMPLES)
    story.took(Prepare(plan_of((1, 1 << 24))), 0.1)
    assert story.found_after(Dispatch(None)) > LIMITS.first_seconds, "a prepared plan counts when it is started"


def test_the_length_of_a_context_is_work() -> None:
    assert step_work(plan_of((1, 0))) == 1 and step_work(plan_of(*[(1, 100)] * 8)) == 8
    assert step_work(plan_of((512, 0))) == 576 and step_work(plan_of((512, 100_000))) > 20 * step_work(
        plan_of((512, 0))
    )
    story = Story()
    story.took(PIECE, 0.1, MIN_SAMPLES)
    assert story.found_after(Dispatch(plan_of((512, 100_000)))) > LIMITS.first_seconds


def test_after_a_pause_a_step_may_take_long_again() -> None:
    """The system may have moved the weights out of memory."""
    story = Story()
    story.took(DECODE, 0.05, MIN_SAMPLES)
    story.now += PAUSE_SECONDS + 1
    story.took(DECODE, 100.0)
    assert story.found_after(DECODE) > HANG_FACTOR * 90


def test_one_slow_step_does_not_loosen_the_bound_for_ever() -> None:
    story = Story()
    story.took(DECODE, 0.05, MIN_SAMPLES)
    story.took(DECODE, 6.0)
    story.took(DECODE, 0.05, 400)
    assert story.found_after(DECODE) <= LIMITS.seconds + 2 * LOOK


def test_a_call_that_waits_behind_another_one_is_not_late() -> None:
    story = Story()
    story.took(DECODE, 5.0, MIN_SAMPLES)
    for _ in range(20):
        story.send(DECODE)
    for _ in range(20):
        assert story.wait(5.0) is None
        story.answer()
    assert story.found_after(DECODE) <= 5.0 * HANG_FACTOR + 2 * LOOK, "nor does it count as slow"


def test_answers_that_came_while_this_process_was_stopped_count() -> None:
    story = Story()
    story.took(DECODE, 0.05, MIN_SAMPLES)
    story.send(DECODE)
    story.now += 600.0
    assert story.calls.find_overdue(story.now, story.used) is None, "the answers are taken before the next look"
    story.answer()
    assert story.wait(100.0) is None


def test_no_call_is_overdue_without_a_limit() -> None:
    story = Story(limits=replace(LIMITS, seconds=0.0))
    story.took(DECODE, 0.05, MIN_SAMPLES)
    story.send(DECODE)
    assert story.wait(1e4) is None


# -- who hangs --------------------------------------------------------------------------------------------------------


def test_who_has_not_answered_hangs_if_the_others_have() -> None:
    story = Story(3)
    story.took(DECODE, 0.05, MIN_SAMPLES)
    story.send(DECODE)
    story.answer(0, 2)
    story.send(DECODE)  # ranks 0 and 2 wait for rank 1 in this one
    found = story.wait(20.0, often=True)
    assert found is not None and found.culprit == 1 and found.ranks == (1,)
    assert found.usual_seconds == pytest.approx(0.05, rel=0.02) and 7.0 < found.seconds < 8.5


@pytest.mark.parametrize(
    ("used", "culprit"),
    [
        ([7.0, 0.1, 7.0], 1),
        ([0.0, 2.0, 2.0], 0),
        ([7.0, 6.0, 7.0], None),
        ([0.0, 0.1, 0.1], None),
        ([7.0, None, 7.0], None),
    ],
)
def test_who_waits_for_numbers_of_others_uses_its_processor(used: list[Any], culprit: int | None) -> None:
    story = Story(3)
    story.took(DECODE, 0.05, MIN_SAMPLES)
    story.used = [50.0, 60.0, 70.0]
    story.send(DECODE)
    assert story.wait(1.0) is None
    story.used = [None if more is None else had + more for had, more in zip((50.0, 60.0, 70.0), used, strict=True)]
    found = story.wait(20.0, often=True)
    assert found is not None and found.culprit == culprit and found.ranks == (0, 1, 2)
    assert found.processor_seconds == pytest.approx(tuple(used))


# -- whatever happens -------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 12).map(lambda bits: Dispatch(plan_of((1 << bits, 0))))


@given(st.lists(st.tuples(SIZES, st.floats(0.0, 6.9)), max_size=40))
def test_no_step_below_the_limit_is_taken_for_one_that_hangs(steps: list[tuple[AnyCall, float]]) -> None:
    story = Story()
    for asks, seconds in steps:
        story.took(asks, seconds)


@given(st.floats(0.001, 200.0), st.lists(st.floats(0.1, 8.0), max_size=30), SIZES)
def test_no_machine_is_too_slow_if_its_steps_are_alike(usual: float, factors: list[float], asks: AnyCall) -> None:
    """Steps that take up to eight times as long as usual, on a machine however slow."""
    story = Story()
    story.took(asks, usual, MIN_SAMPLES)
    for factor in factors:
        story.took(asks, usual * factor)
        story.took(asks, usual)


@given(st.lists(st.tuples(SIZES, st.floats(0.0, 20.0)), max_size=20), SIZES)
def test_every_call_that_hangs_is_found(steps: list[tuple[AnyCall, float]], last: AnyCall) -> None:
    story = Story()
    longest = max((seconds for _, seconds in steps), default=0.0)
    for asks, seconds in steps:
        story.took(asks, min(seconds, 6.9))
    assert story.found_after(last) <= max(LIMITS.first_seconds, HANG_FACTOR * longest) + 2 * LOOK
