"""The trace in a report; what stands in it with both sides is in tests/bench/suites/test_arrivals.py."""

from __future__ import annotations

from cortexmlx.bench.measure.trace import RequestTrace, Stamp, Trace
from cortexmlx.bench.report import traffic
from cortexmlx.bench.report.text import of_part
from cortexmlx.bench.suites.arrivals import Promise, Served, Traffic


def test_a_side_alone_has_no_ratio_and_a_value_of_each_run_to_compare() -> None:
    def run(first: float) -> Trace:
        request = RequestTrace(5, Stamp(0, 0), (1, 2), (Stamp(first, 0), Stamp(first + 1, 0)))
        return Trace(Stamp(0, 0), (request,))

    part = traffic.part([Served("cortexmlx", Promise(), [run(1.0), run(2.0)])], Traffic())
    assert part.tables[0].headings == ("", "cortexmlx") and "ratio" not in of_part(part)
    ttft = next(series for series in part.series if "TTFT" in series.name)
    assert ttft.values == (1.0, 2.0)
