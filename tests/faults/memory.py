"""Faults of the watch on copies, of the count of command buffers, and of the report."""

from __future__ import annotations

from tests.faults.planted import Fault

WATCH, ARENA = "cortexmlx/execution/paged_memory.py", "cortexmlx/kv/arena.py"
BUFFERS = BINDINGS = "cortexmlx/execution/command_buffers.py"
REPORT = IMPERSONAL = "cli/doctor/report.py"

TESTS = (
    "execution/test_copy_watch.py",
    "execution/test_command_buffers.py",
    "kv/test_arena.py",
    "cli/doctor/test_report.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("bytes in use do not count", WATCH, "changes = [active, active", "changes = [active"),
    Fault("freed slabs are not looked for", WATCH, " + self.cached - previous.cached]", "]"),
    Fault("the peak is not looked at", WATCH, "if self.peak > previous.peak:", "if False:"),
    Fault(
        "what others allocate is a copy", WATCH, "for change in changes) else None", "for change in changes) else True"
    ),
    Fault("noise after a copy does not count", WATCH, "and not _is_quiet(arena, large)", "and False"),
    Fault("every copy is logged", WATCH, "if copied_sizes and not was_reported:", "if copied_sizes:"),
    Fault("an arena that grew is not measured again", WATCH, "            self._measured_writes.clear()\n", ""),
    Fault(
        "small arenas are written for nothing",
        WATCH,
        "any(array.nbytes >= _MEASURABLE_RATIO * _WRITE_SLACK for",
        "any(True for",
    ),
    Fault(
        "blocks are copied while they are read",
        ARENA,
        "        mx.eval(values)\n        mx.synchronize()\n",
        "        mx.eval(values)\n",
    ),
    Fault("slabs lie in others' buffers", ARENA, "            mx.clear_cache()\n", ""),
    Fault(
        "a limit is reached one too early", BUFFERS, "operations > limits.operations", "operations >= limits.operations"
    ),
    Fault(
        "elements are not rounded down", BUFFERS, "elements >> 20 > limits.elements", "elements > limits.elements << 20"
    ),
    Fault("eleven in flight", BUFFERS, "IN_FLIGHT = 10", "IN_FLIGHT = 11"),
    Fault("all slabs in the first layer", BINDINGS, "[slabs[layer]] if layer in slabs", "[slabs[0]] if layer in slabs"),
    Fault("a report replaces a file", REPORT, 'path.open("x", encoding', 'path.open("w", encoding'),
    Fault("a report is tried only at the end", REPORT, '        path.open("x").close()\n', "        return\n"),
    Fault("half a report is left", REPORT, "        path.unlink(missing_ok=True)\n", ""),
    Fault("names are told", REPORT, "**names.anonymize_data(sections)", "**sections"),
    Fault("names in other letters are told", IMPERSONAL, ", re.IGNORECASE", ""),
    Fault("keys are told", IMPERSONAL, " and not any(word in name for word in secret_words)", ""),
)
