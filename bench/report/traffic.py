"""The report's section about random arrivals: the waits of users, with a column for each side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cortexmlx.bench.report.section import ChartBar, ReportSection, ReportTable
from cortexmlx.bench.report.text import format_number
from cortexmlx.bench.suites.arrivals import PERCENTILES, Traffic, TrafficResult

KEEPS_UP = 0.6
"""The lowest share of the requests' rate at which the engine keeps up. It is below 1 because the last answers take time
after the last arrival.
"""

BELOW = (
    "TTFT: from a request's arrival to its first token. TPOT: per token after the first, of each request. ITL: between "
    "two tokens. p99: all but one in a hundred were faster. Milliseconds.",
)


def traffic_section(results: Sequence[TrafficResult], traffic: Traffic) -> ReportSection:
    """Return the section about random arrivals, with the figures of all runs together."""
    promise = results[0].promise
    figures = [_side_figures(result) for result in results]
    names = list(figures[0])
    rows = []
    for name in names:
        values = [result_figures[name] for result_figures in figures]
        ratio = (f"{values[0] / values[1]:.2f}x",) if len(values) > 1 and values[1] else ("",) * (len(values) - 1)
        rows.append((name, *map(format_number, values), *ratio))
    table = ReportTable(("", *(side.name for side in results), *(("ratio",) if len(results) > 1 else ())), tuple(rows))
    shared = f"{traffic.shared_fraction:.0%} behind one of {traffic.systems} system prompts of {traffic.system} tokens"
    notes = (
        f"{len(results[0].requests)} requests in {len(results[0].traces)} run(s), at random times, {traffic.rate:g} a "
        f"second: prompts of {traffic.prompt[0]} to {traffic.prompt[1]} tokens, {shared}; answers of "
        f"{traffic.answer[0]} to {traffic.answer[1]}",
        f"goodput: requests per second with TTFT at most {promise.ttft * 1e3:g} ms and TPOT at most "
        f"{promise.tpot * 1e3:g} ms: {', '.join(f'{s.name} {s.good_count} of {len(s.requests)}' for s in results)}",
        *_same_tokens_note(results),
        *_overload_warning(results[0], traffic),
    )
    records = tuple(_json_record(side, found) for side, found in zip(results, figures, strict=True))
    bars = tuple(
        ChartBar(f"TTFT p{p}", side.name, "milliseconds", found[f"TTFT p{p}"])
        for p in PERCENTILES
        for side, found in zip(results, figures, strict=True)
    )
    return ReportSection("trace", "Requests as they come", (table,), (*notes, *BELOW), records, bars)


def _overload_warning(result: TrafficResult, traffic: Traffic) -> tuple[str, ...]:
    """Return a warning if requests came faster than answers. They then wait for each other: the rate sets how long."""
    served_rate = len(result.requests) / sum(trace.total_seconds().wall for trace in result.traces)
    if served_rate > KEEPS_UP * traffic.rate:
        return ()
    return (
        f"requests came faster than they were answered ({served_rate:.2g} a second): they waited for each other. A "
        "lower --request-rate shows what one waits where the machine keeps up",
    )


def _same_tokens_note(results: Sequence[TrafficResult]) -> tuple[str, ...]:
    """Return a line with the number of requests that have the same tokens on both sides."""
    if len(results) < 2:
        return ()
    request_pairs = list(zip(*(result.requests for result in results), strict=True))
    return (
        f"same tokens on both sides in {sum(a.tokens == b.tokens for a, b in request_pairs)} of {len(request_pairs)} "
        "requests",
    )


def _side_figures(result: TrafficResult) -> dict[str, float]:
    """Return throughput, goodput and the percentiles of waits for one side."""
    figures = {"tokens per second": float(np.mean(result.throughput())), "goodput": float(np.mean(result.goodput()))}
    for name, waits in result.waits().items():
        for percentile in PERCENTILES:
            figures[f"{name} p{percentile}"] = 1_000 * float(np.percentile(waits, percentile))
    return figures


def _json_record(result: TrafficResult, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "side": result.name,
        "requests": len(result.requests),
        "good": result.good_count,
        "tokens": result.tokens,
        **figures,
    }
