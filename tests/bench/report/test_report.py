"""The outcome of a benchmark names what it was measured on."""

from __future__ import annotations

from dataclasses import replace

from cortexmlx.bench.report.report import model_lines
from support.cli.bench_reports import MODEL, report


def test_the_header_names_machine_model_and_notes() -> None:
    made = report()
    assert made.header()[:3] == made.machine.lines()
    assert made.header()[3:] == ["m: 3 M parameters, 512 MiB, llama, float32", "a note", "another"]


def test_a_tiny_models_parameters_are_counted() -> None:
    assert "3 M parameters" in model_lines(MODEL)[0]
    assert "90,000 parameters" in model_lines(replace(MODEL, parameters=90_000))[0]
