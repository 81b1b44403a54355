"""The cases beside mlx-lm, and what each should reach."""

from __future__ import annotations

import json

import pytest

from support.bench_model import bench


def test_comparisons_name_their_targets(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, model, "--against", "mlx-lm", "-p", "64", "-n", "12", "-r", "1", "-o", "json")
    comparisons = json.loads(found)["comparisons"]
    targets = {c["case"]: (c["better"], c["target"]) for c in comparisons}
    assert targets == {
        "pp64": (">=", 1.0),
        "pp20 x16": (">=", 1.0),
        "tg12 x1": (">=", 0.95),
        "tg12 x8": (">=", 1.0),
        "tg12 x16": (">=", 1.0),
    }
    for c in comparisons:
        assert c["ratio"] == pytest.approx(c["ours"][0] / c["theirs"][0])
        assert c["same_tokens"] == c["requests"]
