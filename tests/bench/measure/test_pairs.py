"""Two contestants on a noisy machine: runs in pairs, in turns, and the median of their ratios."""

from __future__ import annotations

import pytest

from cortexmlx.bench.measure.pairs import BetterDirection, ComparisonCase, Measure, compare_case
from cortexmlx.bench.measure.trace import RequestTrace, RunTrace, Timestamp


def at(*seconds: float) -> tuple[Timestamp, ...]:
    """Stamps whose CPU time runs at half the speed of wall time."""
    return tuple(Timestamp(s, s / 2) for s in seconds)


def run_of(tokens_per_second: float, ids: tuple[int, ...] = (1, 2)) -> RunTrace:
    stamps = at(1.0, 1.0 + 1.0 / tokens_per_second)
    return RunTrace(at(0.0)[0], (RequestTrace(8, at(0.0)[0], ids, stamps),))


def speeds(ours: list[float], theirs: list[float], order: list[str]) -> ComparisonCase:
    def ran(name: str, rates: list[float], repetition: int) -> RunTrace:
        order.append(f"{name} {repetition}")
        return run_of(rates[repetition], ids=(1, 2) if name == "ours" or repetition else (1, 3))

    measures = (
        Measure("decode", "tok/s", RunTrace.decode_rate, BetterDirection.HIGHER, 1.0),
        Measure("total", "s", RunTrace.total_seconds, BetterDirection.LOWER, 0.9),
        Measure("gap", "s", lambda t: t.longest_gap([0]), BetterDirection.LOWER, 0.7),
    )
    return ComparisonCase("c", "w", lambda r: ran("ours", ours, r), lambda r: ran("theirs", theirs, r), measures)


def test_sides_take_turns_to_go_first() -> None:
    order: list[str] = []
    compare_case(speeds([1, 1, 1], [1, 1, 1], order), 3)
    assert order == ["ours 0", "theirs 0", "theirs 1", "ours 1", "ours 2", "theirs 2"]


def test_the_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_medians() -> None:
    rate, total, gap = compare_case(speeds([2.0, 8.0, 3.0], [1.0, 8.0, 6.0], []), 3)
    assert rate.ratios == pytest.approx((2.0, 1.0, 0.5))
    assert rate.ratio == pytest.approx(1.0)
    assert rate.cpu_ratio == pytest.approx(1.0)
    assert rate.meets_target
    assert total.ratio == pytest.approx(1.0)
    assert not total.meets_target
    assert gap.ratio == pytest.approx(1.0)
    assert gap.cpu_ratio is None
    assert not gap.meets_target


def test_requests_with_the_same_tokens_on_both_sides_are_counted() -> None:
    first, *_ = compare_case(speeds([1, 1, 1], [1, 1, 1], []), 3)
    assert (first.same_tokens, first.requests) == (2, 3)
