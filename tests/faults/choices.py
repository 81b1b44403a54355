"""Faults of timed choices: the wrong candidate, times that are not those of this machine, ways that are not exact."""

from __future__ import annotations

from tests.faults.planted import Fault

CLASSES, TIMED_ON = "cortexmlx/attention/decode_methods.py", "cortexmlx/attention/autotuning.py"
PLAIN_WAYS, ROW_BY_ROW = "cortexmlx/attention/decode_methods.py", "cortexmlx/attention/decode_methods.py"
KERNEL_WAYS, DECODE = "cortexmlx/attention/decode_methods.py", "cortexmlx/attention/decode_methods.py"
TIMING, TABLE, CHOOSER = (f"cortexmlx/autotune/{name}.py" for name in ("timing", "table", "chooser"))
OPENED, MATMULS = "cortexmlx/execution/autotuning.py", "cortexmlx/matmul/autotuning.py"

_FIRST_RUN_COUNTS = "                times[candidate.name] = [budget.run(candidate)]"

TESTS = (
    "autotune",
    "attention/decode_methods",
    "execution/test_autotuning.py",
    "engine/test_timed_choices.py",
    "matmul/test_autotuning.py",
    "attention/test_metal_prefill.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault("the slowest serves", CHOOSER, "name = min(timing.seconds,", "name = max(timing.seconds,"),
    Fault("a choice flaps within the noise", CHOOSER, "best_seconds * (1 + MARGIN)", "best_seconds"),
    Fault(
        "times of other candidates are taken",
        CHOOSER,
        "entry.timing.refused.keys() == job.candidate_names",
        "job.candidate_names >= set()",
    ),
    Fault("times of another kernel text are taken", TABLE, 'content.get("identity") != asdict(self.identity)', "False"),
    Fault("another process's times are dropped", TABLE, " in self.read().items() if", " in {}.items() if"),
    Fault("runs have no bound", TIMING, "self._runs <= 0 or ", ""),
    Fault("timing goes on while somebody waits", TIMING, " or self._has_waiting()", ""),
    Fault(
        "a run begins that ends too late",
        TIMING,
        "start_time + predicted_seconds > self._deadline",
        "start_time > self._deadline",
    ),
    Fault("the run that compiles counts", TIMING, "                times[candidate.name] = []", _FIRST_RUN_COUNTS),
    Fault(
        "one candidate always goes first",
        TIMING,
        "active_candidates if number % 2 == 0 else active_candidates[::-1]",
        "active_candidates",
    ),
    Fault(
        "a dropped launch is the fastest", TIMED_ON, "if not share <= _TOLERANCE[self._layer.dtype]:", "if share < 0:"
    ),
    Fault("layers run side by side", TIMED_ON, "self._queries + out[..., :1] * 0", "self._queries"),
    Fault(
        "a window hides nothing from a class",
        CLASSES,
        "step.lengths - step.attention_window",
        "step.lengths - 0 * step.attention_window",
    ),
    Fault("each row alone in a batch counts as one run", CLASSES, "step.rows == 1 and step.runs[0]", "step.runs[0]"),
    Fault("a way copies without a bound", PLAIN_WAYS, "max_tokens * numbers > MAX_COPIED_BYTES", "max_tokens < 0"),
    Fault(
        "the tail is no part of the view",
        PLAIN_WAYS,
        "if kv.tail is not None:\n        tail_arrays = [array[0,",
        "if kv.tail is None:\n        tail_arrays = [array[0,",
    ),
    Fault("what lies otherwise is rounded otherwise", ROW_BY_ROW, "mx.contiguous(array)", "array"),
    Fault("a row sees what its window hides", ROW_BY_ROW, "np.arange(oldest_token, int(", "np.arange(0, int("),
    Fault(
        "a chosen kernel is not checked",
        KERNEL_WAYS,
        "if self.refusal_reason(forced_variant) is None:",
        "if True:",
    ),
    Fault(
        "choices are not for their class",
        DECODE,
        "self._methods.get((key, kv.derived.get(BatchClass.from_step, kv.step)))",
        "next(iter(self._methods.values()))",
    ),
    Fault(
        "a class has rows on both sides of MLX's limit", MATMULS, "bounds.add(mlx_limit - 1)", "bounds.add(mlx_limit)"
    ),
    Fault("what gains least is timed first", MATMULS, "(-expected_gains[item[0]],", "(expected_gains[item[0]],"),
    Fault(
        "a class is timed with its most rows",
        MATMULS,
        "_make_prepare(shape, run_modules, rows.min_rows, matmuls)",
        "_make_prepare(shape, run_modules, rows.max_rows, matmuls)",
    ),
    Fault(
        "a choice for one kind of layer is all layers'",
        "cortexmlx/attention/metal.py",
        "self.choices.get((variant, attention_window))",
        "next(iter(self.choices.values()), None)",
    ),
    Fault(
        "while a way is timed, the other one computes",
        "cortexmlx/attention/metal.py",
        "{**choices, key: by_kernel}, dict(approvals)",
        "{**choices}, dict(approvals)",
    ),
    Fault(
        "a prefill kernel is timed unchecked",
        TIMED_ON,
        "if by_kernel and not attention.prefill",
        "if False and not attention.prefill",
    ),
    Fault("a reproducible engine times", OPENED, "        if reproducible:\n", "        if False:\n"),
    Fault("a CPU times", OPENED, "bool(mx.default_device() == mx.gpu))", "True)"),
    Fault(
        "a reproducible engine rotates tokens in two ways",
        "cortexmlx/core/in_process_model.py",
        "if config.reproducible:  # the kernel",
        "if False:  # the kernel",
    ),
)
