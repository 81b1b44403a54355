"""Faults of fewer launches: results without the reduce kernel, and long tails."""

from __future__ import annotations

from tests.faults.planted import BACKEND, DECODE, MATRIX, REDUCE, SHARED, Fault

TESTS = (
    "kv/test_sizing.py",
    "scheduling/test_decode_window.py",
    "metal/test_results.py",
    "attention/test_metal.py",
    "engine/test_stale_data.py",
)
"""The tests that judge these faults."""

RESULTS, WINDOW, TAIL = (
    "metal/results.py",
    "cortexmlx/scheduling/decode_window.py",
    "cortexmlx/execution/memory/paged.py",
)
SIZING = "cortexmlx/kv/sizing.py"

FAULTS = (
    Fault("a whole result is not brought under its sink", SHARED, "    out *= factor;\n", ""),
    Fault("a whole result has no sink", SHARED, "SINKS ? results.sinks[query / TOKENS] : 0.0f", "0.0f"),
    Fault("a whole result has the first head's sink", SHARED, "results.sinks[query / TOKENS]", "results.sinks[0]"),
    Fault("query tokens count as heads of a sink", SHARED, "results.sinks[query / TOKENS]", "results.sinks[query]"),
    Fault(
        "whole results of a tile lie at the first tile's", MATRIX, "results, first_query + query,", "results, query,"
    ),
    Fault("only the first slice's lanes know the sum", DECODE, "Results::WHOLE || (slice == 0", "(slice == 0"),
    Fault("only the first number knows the sum", MATRIX, "Results::WHOLE || (CHUNK == 0", "(CHUNK == 0"),
    Fault("whole results of the next KV head", RESULTS, "attended + row_head *", "attended + kv_head *"),
    Fault("a row of one partition takes the way of many", REDUCE, "if (items == 1) {", "if (items < 0) {"),
    Fault("the way of one launch where a row has two partitions", BACKEND, "work.items == kv.step.rows", "work.items"),
    Fault("a tail of one column too few", TAIL, "(0, columns - 1)", "(0, columns - 2)"),
    Fault("one row too many has a long tail", WINDOW, "len(jobs) > self._long", "len(jobs) > 1 + self._long"),
    Fault("rows give up blocks for a long tail", WINDOW, "if fits else TAIL_COLUMNS", "if jobs else TAIL_COLUMNS"),
    Fault("the copy of a long tail is written for nothing", SIZING, "copied = 2 * (LONG", "copied = (LONG"),
    Fault(
        "windows have long tails",
        SIZING,
        "group.spec.window is not None for group in groups):\n        return",
        "False for group in groups):\n        return",
    ),
)
