"""The sections that need no model, through the command."""

from __future__ import annotations

import json

import pytest

from cortexmlx.bench import parts
from cortexmlx.bench.suites import allocations, kernels, pool
from cortexmlx.cli.start import run
from cortexmlx.errors import CortexError
from support.models.bench_model import bench


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.Sizes.__init__, "__defaults__", (1, 2, 1, 4, 20, 8))
    monkeypatch.setattr(parts, "REQUESTS", 8)
    monkeypatch.setattr(kernels, "SHAPES", (kernels.Shape(2, 20, 2, 2, 16),))
    monkeypatch.setattr(kernels, "cost_sheet", lambda chips, tell: [])


@pytest.mark.parametrize("suite", ["pool", "allocator", "kernel"])
def test_a_suite_without_a_model_reports_records_of_its_own(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(bench(capsys, "--suite", suite, "--block-size", "8", "-r", "1", "-o", "json"))
    assert len(found[suite]) >= 2 and found["model"] is None and found["machine"]["chip"]


def test_without_a_compiler_there_is_no_cost_sheet_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        raise CortexError("no compiler")

    monkeypatch.setattr(kernels, "cost_sheet", missing)
    assert "no cost sheet: no compiler" in bench(capsys, "--suite", "kernel", "-r", "1")


def test_an_interrupt_during_the_cost_sheet_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "cost_sheet", interrupted)
    assert run(["bench", "--suite", "kernel", "-r", "1"]) == 130
    assert "GB/s" in capsys.readouterr().out
    monkeypatch.setattr(allocations, "measure", interrupted)
    assert run(["bench", "--suite", "allocator", "-r", "1"]) == 130
    assert "before anything was measured" in capsys.readouterr().err
