"""Faults of fewer launches: results without the reduce kernel, long tails, and the kernel that writes the tail."""

from __future__ import annotations

from tests.faults.planted import BACKEND, DECODE, MATRIX, REDUCE, SHARED, Fault

TESTS = (
    "kv/test_sizing.py",
    "scheduling/test_decode_window.py",
    "metal/test_results.py",
    "metal/test_tail_write.py",
    "attention/test_tail_write.py",
    "attention/test_metal.py",
    "attention/selfcheck/test_check.py",
    "engine/test_stale_data.py",
)
"""The tests that judge these faults."""

RESULTS, WINDOW, TAIL = (
    "metal/results.py",
    "cortexmlx/scheduling/decode_window.py",
    "cortexmlx/execution/paged_memory.py",
)
SIZING = "cortexmlx/kv/sizing.py"
WRITE, WRITE_ENTRY, WRITER = (
    "metal/shaders/tail_write.metal",
    "metal/tail_write.py",
    "cortexmlx/attention/tail_write.py",
)

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
    Fault("rows give up blocks for a long tail", WINDOW, "if all_fit else TAIL_COLUMNS", "if jobs else TAIL_COLUMNS"),
    Fault("the copy of a long tail is written for nothing", SIZING, "copied_bytes = 2 * (LONG", "copied_bytes = (LONG"),
    Fault(
        "windows have long tails",
        SIZING,
        "group.spec.window is not None for group in groups):\n        return",
        "False for group in groups):\n        return",
    ),
    Fault("no barrier between norm and rotation", WRITE, "  simdgroup_barrier(mem_flags::mem_threadgroup);\n", ""),
    Fault("the norm has no epsilon", WRITE, " / float(DIM) + eps)", " / float(DIM))"),
    Fault("the norm has no weight", WRITE, "T(float(x) * float(weight[d]))", "x"),
    Fault("pairs turn the other way", WRITE, "T(a * c - b * s)", "T(a * c + b * s)"),
    Fault("pairs are never neighbours", WRITE, "TRADITIONAL ? 2 * pair : pair;", "pair;"),
    Fault("frequencies multiply", WRITE, "1.0f / rotation.frequencies[pair]", "rotation.frequencies[pair]"),
    Fault(
        "what is not rotated is left out", WRITE, "d = ROTATED + int(lane); d < DIM", "d = ROTATED + int(lane); d < 0"
    ),
    Fault("the new column is copied, too", WRITE, "if (c == column) {", "if (c == column - 64) {"),
    Fault("a tail that begins is not zeros", WRITE, "if (begins) {", "if (false) {"),
    Fault(
        "keys have the queries' norm",
        WRITE_ENTRY,
        "key_weight, numbers_of_layer[3]",
        "query_weight, numbers_of_layer[2]",
    ),
    Fault("all rows are at the first position", WRITE_ENTRY, "step_places[3 + row]", "step_places[3]"),
    Fault("positions are not scaled", WRITE_ENTRY, "numbers_of_layer[1] * float", "float"),
    Fault("a change in place is not seen", WRITER, "        self.origin = None\n        return", "        return"),
    Fault("changed queries are replaced", WRITER, "if queries is self.original_queries and", "if True or"),
    Fault(
        "positions go through halves",
        WRITE,
        "return rotation.position * turn",
        "return float(half(rotation.position)) * turn",
    ),
    Fault(
        "positions go through bfloat16",
        WRITE,
        "return rotation.position * turn",
        "return float(bfloat(rotation.position)) * turn",
    ),
    Fault("changed keys are replaced", WRITER, "rotated_keys is not keys\n            or not", "not"),
    Fault("what is rotated may change later", WRITER, "return x.astype(x.dtype)", "return x"),
    Fault(
        "a norm of one more is one",
        WRITER,
        "for candidate in (weight, 1.0 + weight):\n            if",
        "for candidate in (weight,):\n            if True or",
    ),
    Fault(
        "a rotation that scales is taken for one that does not",
        WRITER,
        "kind is YarnRoPE and module.mscale == 1.0",
        "kind is YarnRoPE",
    ),
    Fault(
        "a norm with a gate is taken for one without", WRITER, " is not weight or args or kwargs:", " is not weight:"
    ),
    Fault(
        "a first step that failed has tried the modules",
        WRITER,
        "        if self._step_count < _PRUNE_STEP:\n            self._step_count = 0",
        "        if False:\n            self._step_count = 0",
    ),
    Fault("unused modules stay followed", WRITER, "if self._step_count == _PRUNE_STEP:", "if self._step_count < 0:"),
)
