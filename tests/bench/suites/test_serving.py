"""The cases of `--suite serving`."""

from __future__ import annotations

import pytest

from support.models.bench_model import bench


def test_a_serving_case_reports_both_of_its_measures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--suite", "serving", "--case", "long prompt arrives", "-r", "1"]
    text = bench(capsys, model, "--against", "mlx-lm", *chosen)
    assert "longest gap between tokens" in text
    assert "TTFT of the new prompt" in text
