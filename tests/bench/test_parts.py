"""The sections that need no model, through the command."""

from __future__ import annotations

import json

import pytest

from cortexmlx.bench.suites import kernels, pool
from cortexmlx.cli.start import run
from support.models.bench_model import bench


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.PoolSizes.__init__, "__defaults__", (1, 2, 1, 4, 20, 8))
    monkeypatch.setattr(kernels, "SHAPES", (kernels.KernelShape(2, 20, 2, 2, 16),))


@pytest.mark.parametrize("suite", ["pool", "kernel"])
def test_a_suite_without_a_model_reports_records_of_its_own(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(bench(capsys, "--suite", suite, "--block-size", "8", "-r", "1", "-o", "json"))
    assert len(found[suite]) >= 2 and found["model"] is None and found["machine"]["chip"]


def test_an_interrupt_before_the_first_figure_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "measure_writers", interrupted)
    assert run(["bench", "--suite", "pool", "-r", "1"]) == 130
    assert "before anything was measured" in capsys.readouterr().err
