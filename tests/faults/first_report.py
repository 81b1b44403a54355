"""Faults of what is told and concluded from afar: doctor's verdicts, and the rules that read a first report."""

from __future__ import annotations

from tests.faults.planted import Fault

RULES, CHECKS = "bench/studies/first_report.py", "cli/doctor/checks.py"
MACHINE, SELFCHECK = "cortexmlx/system/machine.py", "cortexmlx/attention/selfcheck.py"

TESTS = (
    "bench/studies/test_first_report.py",
    "cli/doctor/test_checks.py",
    "engine/test_machine.py",
    "attention/selfcheck/test_check.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault(
        "a block size changes within the noise", RULES, "best if gain >= GAIN else None", "best if gain > 0 else None"
    ),
    Fault("one step decides a block size", RULES, "max((min(of[now] / of[size]", "max((max(of[now] / of[size]"),
    Fault("a build without NAX judges matrix units", RULES, ' and report["gpu"]["matrix_kernels"]', ""),
    Fault("times beside a wrong kernel count", RULES, "if each is RULES[0]:", "if False:"),
    Fault("a virtual GPU decides", RULES, '.get("trusted") is not True', '.get("trusted") is None'),
    Fault("a queue that is not cut is made longer", RULES, 'buffers["run_ahead"] < 1 and ratio', "ratio"),
    Fault(
        "a wrong kernel fails a virtual GPU", CHECKS, " and not check.refused and trusted:", " and not check.refused:"
    ),
    Fault("an unknown build of MLX uses matrix units", MACHINE, "mlx_has_matrix_kernels() is True", "True"),
    Fault("kernels compiled later are none", MACHINE, 'kernels.find(b"steel_gemm_") >= 0', "True"),
    Fault("a far error is told smaller", SELFCHECK, "replace(self, error=max(self.error, error))", "self"),
)
