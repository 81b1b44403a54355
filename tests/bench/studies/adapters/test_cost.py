"""The study of what adapters cost, on a tiny model: that it measures what it says. How fast is not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.bench.studies.adapters import cost


def test_each_kind_of_work_names_adapters_that_are_written(tiny: Any, tmp_path: Path) -> None:
    with cost.open_engine(str(tiny("llama")), None) as plain:
        folders = cost.write_adapters(plain, tmp_path)
        named = {name for _, _, names in cost.KINDS for name in names if name is not None}
        assert named == set(folders) and len(folders) == 2 * cost.ADAPTERS
        with cost.open_engine(str(tiny("llama")), folders) as served:
            assert set(served.adapters) == named
            assert len(served.adapters["seven 0"].targets) == 14 and len(served.adapters["two 0"].targets) == 4


def test_the_work_is_done(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "TOKENS", 3)
    monkeypatch.setattr(cost, "PROMPT", 60)
    with cost.open_engine(str(tiny("llama")), None) as plain:
        folders = cost.write_adapters(plain, tmp_path)
        with cost.open_engine(str(tiny("llama")), folders) as served:
            assert cost.time_decode(served, cost.SEVENS) > 0 and cost.time_prefill(served, cost.TWOS) > 0
            stats = served.stats()
            assert stats.generated_tokens == 16 * 3 + cost.PROMPTS and stats.prompt_tokens == 16 * 3 + cost.PROMPTS * 60
