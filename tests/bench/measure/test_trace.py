"""The figures of a benchmark follow from the stamps as they are defined."""

from __future__ import annotations

import pytest

from cortexmlx.bench.measure.trace import Figure, RequestTrace, RunTrace, Timestamp


def at(*seconds: float) -> tuple[Timestamp, ...]:
    """Stamps whose CPU time runs at half the speed of wall time."""
    return tuple(Timestamp(s, s / 2) for s in seconds)


def request(prompt_tokens: int, submitted: float, *stamps: float) -> RequestTrace:
    return RequestTrace(prompt_tokens, at(submitted)[0], tuple(range(len(stamps))), at(*stamps))


RUN = RunTrace(
    at(10.0)[0],
    (
        request(30, 10.0, 12.0, 13.0, 14.0, 15.0, 19.0),
        request(70, 11.0, 14.0, 15.0, 16.0, 17.0, 18.0, 20.0),
    ),
    kv_bytes=4096,
)


def test_prefill_counts_all_prompt_tokens_until_the_last_request_has_a_token() -> None:
    assert RUN.prefill_rate() == Figure(100 / 4.0, 100 / 2.0)


def test_decode_counts_tokens_only_while_all_requests_decode() -> None:
    # From 14.0 (the second starts) to 19.0 (the first ends): 15, 19 of the first; 15, 16, 17, 18 of the second.
    assert RUN.decode_rate() == Figure(2 / 5.0 + 4 / 4.0, 2 / 2.5 + 4 / 2.0)


def test_tokens_of_one_step_count_all_or_none() -> None:
    """A side that hands them out one after the other is no slower than one that does so all at once."""
    later = (request(1, 0.0, 1.0, 2.0, 3.0), request(1, 0.0, 1.01, 2.01, 3.01), request(1, 0.0, 1.02, 2.02, 3.02))
    assert RunTrace(at(0.0)[0], later).decode_rate().wall == pytest.approx(3.0)


def test_requests_that_never_decode_together_have_no_decode_rate() -> None:
    trace = RunTrace(at(0.0)[0], (request(1, 0.0, 1.0, 2.0), request(1, 0.0, 3.0, 4.0)))
    with pytest.raises(ValueError, match="generate more tokens"):
        trace.decode_rate()


def test_other_figures_of_a_run() -> None:
    assert RUN.total_seconds() == Figure(10.0, 5.0)
    assert RUN.ttft(1) == Figure(3.0, 1.5)
    assert RUN.longest_gap([0]) == Figure(4.0)
    assert RUN.longest_gap([1]) == Figure(2.0)
    assert RUN.kv_peak() == Figure(4096.0)
