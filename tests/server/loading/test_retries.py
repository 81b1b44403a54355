"""A model whose load failed is tried again later, and later still each time."""

from __future__ import annotations

from cortexmlx.server.residency import FIRST_SECONDS, MOST_SECONDS, Retries


def test_each_failure_in_a_row_doubles_the_wait_up_to_a_bound() -> None:
    retries, cause, now = Retries(), OSError("damaged"), 100.0
    assert retries.refusal("a", now) is None
    waits = []
    for _ in range(9):
        seconds = retries.failed("a", cause, now)
        assert retries.refusal("a", now) == (cause, seconds) and retries.refusal("b", now) is None
        assert retries.refusal("a", now + seconds - 0.5) == (cause, 0.5)
        now += seconds
        assert retries.refusal("a", now) is None
        waits.append(seconds)
    assert waits[:3] == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS] and waits[-1] == MOST_SECONDS
    assert waits == sorted(waits)


def test_a_request_that_was_served_forgets_the_failures() -> None:
    retries = Retries()
    retries.failed("a", OSError(), 0.0)
    retries.failed("a", OSError(), 0.0)
    assert not retries.serves("a")
    retries.served("a")
    assert retries.serves("a")
    assert retries.refusal("a", 0.0) is None
    assert retries.failed("a", OSError(), 0.0) == FIRST_SECONDS
    assert not retries.serves("a")
    retries.served("a")
    retries.unloaded("a")
    assert not retries.serves("a") and retries.refusal("a", 0.0) is None
