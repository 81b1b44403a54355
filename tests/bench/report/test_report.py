"""The outcome of a benchmark names what it was measured on."""

from __future__ import annotations

from support.bench_reports import report


def test_the_header_names_machine_model_and_notes() -> None:
    made = report()
    assert made.header()[:3] == made.machine.lines()
    assert made.header()[3:] == ["m: 3 M parameters, 512 MiB, llama, float32", "a note", "another"]
