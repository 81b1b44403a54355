"""A job's place in the queue: by arrival, priority and background."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from cortexmlx.scheduling.job import BACKGROUND_DELAY, SECONDS_PER_PRIORITY
from support.clockwork import Clockwork


def test_a_high_priority_overtakes_but_a_low_one_does_not_wait_for_ever() -> None:
    clock = Clockwork(cost=1e-2, max_rows=1)
    low = clock.add(0, 8, tokens=4, priority=-1)
    clock.step()
    clock.add(1, 8, tokens=4, priority=-1)
    later = 2
    while 1 not in clock.first:
        if later < 5_000:
            clock.add(later, 8, tokens=4)
            later += 1
        clock.step(3)
    assert low.finish_reason is not None
    assert clock.first[2] < clock.first[1], "those of higher priority who came later went first"
    assert clock.first[1] < SECONDS_PER_PRIORITY * 2, "but not all of them"


def test_of_background_requests_the_longest_begin_first_and_watched_ones_before_them() -> None:
    works = Clockwork(cost=0.001, max_rows=1, target=None)
    works.add(0, 10, tokens=2)
    for request, tokens in enumerate((5, 300, 40), start=1):
        works.add(request, 10, tokens=tokens, background=True)
    works.now += BACKGROUND_DELAY / 2 - 1
    works.add(4, 10, tokens=10_000)
    assert sorted(range(5), key=works.until_first) == [0, 4, 2, 3, 1]


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_the_delay_of_background_requests_has_an_end(one: int, other: int) -> None:
    works = Clockwork(cost=0.001)
    early = works.add(0, 1, tokens=one, background=True)
    works.now += BACKGROUND_DELAY
    late = works.add(1, 1, tokens=other)
    assert early.order < late.order
    works.now -= BACKGROUND_DELAY / 2 + 1e-6
    assert works.add(2, 1, tokens=other).order < early.order
