"""Faults of what is done before the first answer: kernels that are compiled in it after all, texts that grow."""

from __future__ import annotations

from tests.faults.planted import Fault

BACKEND, WARM_UP = "cortexmlx/attention/metal.py", "cortexmlx/core/in_process_model.py"
HOOK, OPENED = "cortexmlx/attention/mlx_lm_hook.py", "cortexmlx/core/in_process_model.py"
CALLS, TEXT = "metal/kernels.py", "metal/kernels.py"

TESTS = ("metal/test_text.py", "core/test_warm_up.py", "attention/test_calls.py")
"""The tests that judge these faults."""

FAULTS = (
    Fault("a plain kernel carries quantized code", CALLS, "quantized=quantized)", "quantized=True)"),
    Fault("a text is sent as it is written", CALLS, "header=minify(text)", "header=text"),
    Fault(
        "a literal loses its spaces",
        TEXT,
        'line break. A literal is returned as it is."""\n    if match["kept"] is not None:',
        'line break. A literal is returned as it is."""\n    if match["kept"] == "":',
    ),
    Fault("a comment in a macro ends it", TEXT, '"\\\\\\n")', '"\\n")'),
    Fault("lines move", TEXT, 'return " " + breaks *', 'return " " + 0 *'),
    Fault(
        "prefill kernels are compiled in an answer",
        BACKEND,
        "if self.prefill.is_preferred(shape, window):",
        "if False:",
    ),
    Fault(
        "the probe does not see sinks",
        HOOK,
        "handle.note(AttentionCall.from_arguments(queries, params))",
        "handle.note(AttentionCall.from_arguments(queries, AttentionParams(params.scale, softcap=params.softcap)))",
    ),
    Fault(
        "the probe does not see a soft cap",
        HOOK,
        "handle.note(AttentionCall.from_arguments(queries, params))",
        "handle.note(AttentionCall.from_arguments(queries, AttentionParams(params.scale, params.sinks)))",
    ),
    Fault(
        "opening does not wait for the kernels",
        WARM_UP,
        "while done_count < self._total and any",
        "while False and any",
    ),
    Fault("what raises ends all checks", WARM_UP, "            except Exception:\n", "            except EOFError:\n"),
    Fault("a closed engine goes on compiling", OPENED, "        self._warm_up.stop()\n", ""),
    Fault("a small input is another kernel", "metal/work.py", "SMALL = 8\n", "SMALL = 2\n"),
)
