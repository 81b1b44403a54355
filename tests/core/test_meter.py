"""Latencies and the timeline: bounded memory, right numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from cortexmlx.core.meter import LatencyMeter, UsageSample, UsageTimeline
from support.engine.core_driver import Driver
from support.models.tiny import tokens_of


def test_a_summary_tells_of_the_newest_and_counts_all() -> None:
    meter = LatencyMeter()
    assert meter.summary().count == 0 and meter.summary().longest == 0.0
    for value in range(2_000):
        meter.add(float(value))
    summary = meter.summary()
    assert (summary.count, summary.longest, summary.p50) == (2_000, 1_999.0, 1_487.0)
    assert summary.mean == sum(range(976, 2_000)) / 1_024


@given(st.lists(st.floats(0, 3), max_size=400), st.integers(4, 20))
def test_a_timeline_is_bounded_begins_at_the_beginning_and_reaches_to_the_end(waits: list[float], size: int) -> None:
    timeline, now, taken = UsageTimeline(size, 0.25), 0.0, []
    for wait in waits:
        now += wait
        if timeline.is_due(now):
            timeline.add(UsageSample(now, 1, 2, 3, 4, 5))
            taken.append(now)
    kept = [moment.seconds for moment in timeline.samples()]
    assert len(kept) < size and set(kept) <= set(taken) and kept == sorted(kept)
    assert kept[:1] == taken[:1]
    longest = max((b - a for a, b in pairwise(kept)), default=0.0)
    if kept:
        assert now - kept[-1] <= max(longest, 2 * timeline._interval) + max(waits)


def test_an_engine_tells_how_its_blocks_were_used_over_time(tiny: Any) -> None:
    driver = Driver(tiny("llama"), tokens=320, max_rows=2)
    driver.core.measurements.timeline = UsageTimeline(interval=0.0)
    prompt = tokens_of(40, seed=5)
    for _ in range(2):
        driver.add(prompt, 20)
        driver.finish()
    driver.core.tidy()
    stats = driver.core.stats()
    first, last = stats.timeline[0], stats.timeline[-1]
    assert first.used_blocks and first.rows_running and not last.used_blocks and not last.rows_running
    assert last.cached_blocks == stats.cached_blocks and last.free_blocks == stats.free_blocks == stats.total_blocks
    for _ in range(1_000):
        driver.core.tidy()
    assert driver.core.stats().timeline == stats.timeline, "an idle engine has nothing to tell"
    assert stats.hit_rate == stats.cached_tokens / 80 == 39 / 80
