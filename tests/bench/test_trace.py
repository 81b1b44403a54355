"""The figures of a benchmark follow from the stamps as they are defined, and pairs of runs are compared fairly."""

from __future__ import annotations

import pytest

from cortexmlx.bench.pairs import Better, Case, Measure, compare
from cortexmlx.bench.prompts import Prompts
from cortexmlx.bench.trace import Figure, RequestTrace, Stamp, Trace


def at(*seconds: float) -> tuple[Stamp, ...]:
    """Stamps whose CPU time runs at half the speed of wall time."""
    return tuple(Stamp(s, s / 2) for s in seconds)


def request(prompt_tokens: int, submitted: float, *stamps: float) -> RequestTrace:
    return RequestTrace(prompt_tokens, at(submitted)[0], tuple(range(len(stamps))), at(*stamps))


RUN = Trace(
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
    assert RUN.decode_rate() == Figure(6 / 5.0, 6 / 2.5)


def test_requests_that_never_decode_together_have_no_decode_rate() -> None:
    trace = Trace(at(0.0)[0], (request(1, 0.0, 1.0, 2.0), request(1, 0.0, 3.0, 4.0)))
    with pytest.raises(ValueError, match="generate more tokens"):
        trace.decode_rate()


def test_other_figures_of_a_run() -> None:
    assert RUN.total() == Figure(10.0, 5.0)
    assert RUN.ttft(1) == Figure(3.0, 1.5)
    assert RUN.longest_gap([0]) == Figure(4.0)
    assert RUN.longest_gap([1]) == Figure(2.0)
    assert RUN.kv_peak() == Figure(4096.0)


def run_of(tokens_per_second: float, ids: tuple[int, ...] = (1, 2)) -> Trace:
    stamps = at(1.0, 1.0 + 1.0 / tokens_per_second)
    return Trace(at(0.0)[0], (RequestTrace(8, at(0.0)[0], ids, stamps),))


def speeds(ours: list[float], theirs: list[float], order: list[str]) -> Case:
    def ran(name: str, rates: list[float], repetition: int) -> Trace:
        order.append(f"{name} {repetition}")
        return run_of(rates[repetition], ids=(1, 2) if name == "ours" or repetition else (1, 3))

    measures = (
        Measure("decode", "tok/s", Trace.decode_rate, Better.HIGHER, 1.0),
        Measure("total", "s", Trace.total, Better.LOWER, 0.9),
        Measure("gap", "s", lambda t: t.longest_gap([0]), Better.LOWER, 0.7),
    )
    return Case("c", "w", lambda r: ran("ours", ours, r), lambda r: ran("theirs", theirs, r), measures)


def test_sides_take_turns_to_go_first() -> None:
    order: list[str] = []
    compare(speeds([1, 1, 1], [1, 1, 1], order), 3)
    assert order == ["ours 0", "theirs 0", "theirs 1", "ours 1", "ours 2", "theirs 2"]


def test_the_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_medians() -> None:
    rate, total, gap = compare(speeds([2.0, 8.0, 3.0], [1.0, 8.0, 6.0], []), 3)
    assert rate.ratios == pytest.approx((2.0, 1.0, 0.5))
    assert rate.ratio == pytest.approx(1.0)
    assert rate.cpu_ratio == pytest.approx(1.0)
    assert rate.met
    assert total.ratio == pytest.approx(1.0)
    assert not total.met
    assert gap.ratio == pytest.approx(1.0)
    assert gap.cpu_ratio is None
    assert not gap.met


def test_requests_with_the_same_tokens_on_both_sides_are_counted() -> None:
    first, *_ = compare(speeds([1, 1, 1], [1, 1, 1], []), 3)
    assert (first.same_tokens, first.requests) == (2, 3)


def test_prompts_never_repeat_and_a_seed_gives_the_same_ones_again() -> None:
    stream, again, other = Prompts(5_000, 1), Prompts(5_000, 1), Prompts(5_000, 2)
    taken = [stream.take(16) for _ in range(50)]
    assert len(set(taken)) == 50
    assert taken == [again.take(16) for _ in range(50)]
    assert other.take(16) not in taken
    assert all(0 <= token < 5_000 for prompt in taken for token in prompt)


def test_lengths_spread_over_the_whole_range_and_reach_its_end() -> None:
    lengths = Prompts(100, 0).lengths(400, 64, 1024)
    assert min(lengths) >= 64
    assert max(lengths) == 1024
    short = sum(length < 256 for length in lengths)  # log-uniform: half of them are below the geometric mean
    assert 150 < short < 250
