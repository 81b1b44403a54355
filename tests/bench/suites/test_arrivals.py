"""Requests at random times: the same for both sides, every token counted, figures as they are defined."""

from __future__ import annotations

import numpy as np
import pytest

from cortexmlx import Engine
from cortexmlx.bench.measure.prompts import PromptStream
from cortexmlx.bench.measure.trace import RequestTrace, RunTrace, Timestamp
from cortexmlx.bench.report import traffic as report
from cortexmlx.bench.report.text import section_markdown
from cortexmlx.bench.suites.arrivals import LatencyLimits, Traffic, TrafficResult, run_traffic

SMALL = Traffic(8, 100.0, (4, 40), (4, 12), systems=1, system=16)


def test_arrivals_are_a_seeded_poisson_process_with_shared_beginnings() -> None:
    traffic = Traffic(2_000, 4.0)
    work = traffic.draw_requests(PromptStream(50_000, 1), 1)
    gaps = np.diff([w.arrival_seconds for w in work])
    assert abs(gaps.mean() - 0.25) < 0.02 and abs(gaps.std() - 0.25) < 0.03  # exponential: as wide as long
    starts = [w.prompt[:256] for w in work]
    often = sorted((starts.count(start) for start in set(starts)), reverse=True)
    assert 0.7 < sum(often[:2]) / len(work) < 0.8 and often[2] == 1
    assert (
        traffic.draw_requests(PromptStream(50_000, 1), 1) == work != traffic.draw_requests(PromptStream(50_000, 1), 2)
    )


def test_both_sides_produce_the_same_tokens_and_all_are_counted(engine: Engine) -> None:
    before, sides = engine.stats(), list[TrafficResult]()
    run_traffic(engine, SMALL, LatencyLimits(), 2, 0, True, sides, lambda what: None)
    ours, theirs = sides
    warm_up = 4 * 8
    assert ours.tokens + warm_up == engine.stats().generated_tokens - before.generated_tokens
    assert [r.tokens for r in ours.requests] == [r.tokens for r in theirs.requests]
    for request in (*ours.requests, *theirs.requests):
        assert request.stamps[0].wall > request.submit_time.wall
    text = section_markdown(report.traffic_section(sides, SMALL))
    assert max(map(len, text.splitlines())) <= 80
    assert "same tokens on both sides in 16 of 16 requests" in " ".join(text.split())


def test_an_interrupt_keeps_whole_repetitions(engine: Engine) -> None:
    sides: list[TrafficResult] = []

    def stop(what: str) -> None:
        if "run 2" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_traffic(engine, SMALL, LatencyLimits(), 2, 0, False, sides, stop)
    assert [len(side.traces) for side in sides] == [1]


def stamps(*seconds: float) -> tuple[Timestamp, ...]:
    return tuple(Timestamp(s, s) for s in seconds)


def test_figures_are_those_of_the_definitions() -> None:
    fast = RequestTrace(5, stamps(1.0)[0], (1, 2, 3), stamps(1.5, 1.6, 1.7))
    slow = RequestTrace(5, stamps(2.0)[0], (1, 2), stamps(7.0, 10.0))
    side = TrafficResult("cortexmlx", LatencyLimits(2.0, 0.2), [RunTrace(stamps(0.0)[0], (fast, slow))])
    assert side.throughput() == [0.5] and side.goodput() == [0.1] and side.good_count == 1 and side.tokens == 5
    waits = side.waits()
    assert waits["TTFT"] == [0.5, 5.0] and waits["TPOT"] == pytest.approx([0.1, 3.0])
    assert waits["ITL"] == pytest.approx([0.1, 0.1, 3.0])
    [record] = report.traffic_section([side], SMALL).records
    assert record["TTFT p50"] == pytest.approx(2750.0) and record["ITL p50"] == pytest.approx(100.0)
