"""Reports without a benchmark: a model, some rows, a comparison."""

from __future__ import annotations

from dataclasses import fields

from cortexmlx.bench.measure.machine import BenchMachine
from cortexmlx.bench.measure.pairs import BetterDirection, Comparison
from cortexmlx.bench.report.report import Report
from cortexmlx.bench.report.section import ReportSection
from cortexmlx.bench.suites.rows import SpeedTest, StepSplit, TestResult
from cortexmlx.stats import ModelInfo

MODEL = ModelInfo(
    **{f.name: 0 for f in fields(ModelInfo)}  # type: ignore[arg-type]
    | {
        "name": "m",
        "notes": ("a note",),
        "parameters": 3_000_000,
        "weight_bytes": 2**29,
        "architecture": "llama",
        "dtype": "float32",
        "identity": "abc",
    }
)
SPLIT = StepSplit(9, 0.5, 1.0, 2.0, 0.25)
ROW = TestResult(SpeedTest(0, 128, 4, 512), 32, (40.0, 44.0), (20.0, 25.0), 2**29, 3 * 2**30, SPLIT, 1024)
COMPARED = Comparison(
    "pp512", "a prompt", "prefill", "tok/s", BetterDirection.HIGHER, 1.0, (3000.0, 1.5), (2000.0, 3.0), (), (), 1, 2
)


def report(section: ReportSection) -> Report:
    """With this section."""
    return Report(BenchMachine.detect(), MODEL, section, ("another",))
