"""The trace in a report; what stands in it with both sides is in tests/bench/suites/test_arrivals.py."""

from __future__ import annotations

from cortexmlx.bench.measure.trace import RequestTrace, RunTrace, Timestamp
from cortexmlx.bench.report import traffic
from cortexmlx.bench.report.text import section_markdown
from cortexmlx.bench.suites.arrivals import LatencyLimits, Traffic, TrafficResult


def test_a_side_alone_has_no_ratio() -> None:
    def run(first: float) -> RunTrace:
        request = RequestTrace(5, Timestamp(0, 0), (1, 2), (Timestamp(first, 0), Timestamp(first + 1, 0)))
        return RunTrace(Timestamp(0, 0), (request,))

    part = traffic.traffic_section([TrafficResult("cortexmlx", LatencyLimits(), [run(1.0), run(2.0)])], Traffic())
    assert part.tables[0].headings == ("", "cortexmlx") and "ratio" not in section_markdown(part)


def test_requests_that_came_too_fast_are_said_to_have_waited_for_each_other() -> None:
    request = RequestTrace(5, Timestamp(0, 0), (1, 2), (Timestamp(1, 0), Timestamp(20, 0)))
    sides = [
        TrafficResult("cortexmlx", LatencyLimits(), [RunTrace(Timestamp(0, 0), (request,) * 10)])
    ]  # ten in twenty seconds
    text = " ".join(section_markdown(traffic.traffic_section(sides, Traffic(rate=1.0))).split())
    assert "came faster than they were answered (0.5 a second)" in text
    assert "came faster" not in section_markdown(traffic.traffic_section(sides, Traffic(rate=0.6)))
