"""Two contestants on a noisy machine: runs in pairs, in turns, and the median of their ratios."""

from __future__ import annotations

import pytest

from cortexmlx.bench.measure.pairs import Better, Case, Measure, compare
from cortexmlx.bench.measure.trace import RequestTrace, Stamp, Trace


def at(*seconds: float) -> tuple[Stamp, ...]:
    """Stamps whose CPU time runs at half the speed of wall time."""
    return tuple(Stamp(s, s / 2) for s in seconds)


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
