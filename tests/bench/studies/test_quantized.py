"""The steps that are compared: of every row, by engines that keep what they are asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.bench.studies import quantized
from support.models.quantized_models import wide


def test_each_side_decodes_all_rows_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, order = str(wide(tmp_path, "llama")), []
    step = quantized._Side.step

    def noted(side: Any) -> quantized.Seconds:
        before = side.core.measured.generated_tokens
        seconds = step(side)
        assert side.core.measured.generated_tokens == before + 2
        order.append(side.core.stats().kv_bits)
        return seconds

    monkeypatch.setattr(quantized._Side, "step", noted)
    found = quantized.measure(model, 2, 9, 3, (None, 8))
    assert order == [None, 8, 8, None, None, 8] and [len(steps) for steps in found] == [3, 3]
    assert all(seconds.wall > 0 for steps in found for seconds in steps)


def test_the_table_has_a_line_for_each_number_of_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "STEPS", 3)
    monkeypatch.setattr(quantized, "ROWS", 2)
    lines = quantized.table(str(wide(tmp_path, "llama")), 8).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["8", "4"] and lines[2].count("x") == 6
