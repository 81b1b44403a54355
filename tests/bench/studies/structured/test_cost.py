"""The study's pairs: both runs of a pair write the same number of tokens, and the ratio is of their times."""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.bench.studies.structured import cost


def test_the_rows_of_a_pair_have_the_same_number_of_tokens(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "TOKENS", 12)
    with Engine(tiny("llama"), kv_memory="4MB", max_rows=cost.ROWS) as engine:
        assert cost.seconds(engine, 0) > 0 and cost.seconds(engine, 5) > 0
        stats = engine.stats()
        assert stats.generated_tokens == 2 * 12 * cost.ROWS
        assert stats.mask_seconds > 0


def test_a_line_for_each_case(tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cost, "TOKENS", 8)
    cost.main(str(tiny("llama")), pairs=1)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("8 of 16 rows: ") and second.startswith("16 of 16 rows: ")
