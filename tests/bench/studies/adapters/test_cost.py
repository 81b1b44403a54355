"""The study of what adapters cost, on a tiny model: that it measures what it says. How fast is not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.bench.studies.adapters import cost


def test_each_kind_of_work_names_adapters_that_are_written(tiny: Any, tmp_path: Path) -> None:
    with cost.opened(str(tiny("llama")), None) as plain:
        folders = cost.written(plain, tmp_path)
        named = {name for _, _, names in cost.KINDS for name in names if name is not None}
        assert named == set(folders) and len(folders) == 2 * cost.ADAPTERS
        with cost.opened(str(tiny("llama")), folders) as served:
            assert set(served.adapters) == named
            assert len(served.adapters["seven 0"].targets) == 14 and len(served.adapters["two 0"].targets) == 4


def test_a_ratio_is_without_over_with(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cost.opened(str(tiny("llama")), None) as plain, cost.opened(str(tiny("llama")), None) as served:
        kind = ("work", lambda engine, names: 1.0 if engine is plain else 4.0, [None])
        assert str(cost.measure(plain, served, kind, 3)) == "work: 0.250 (0.250 to 0.250)"


def test_the_work_is_done(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "TOKENS", 3)
    monkeypatch.setattr(cost, "PROMPT", 60)
    with cost.opened(str(tiny("llama")), None) as plain:
        folders = cost.written(plain, tmp_path)
        with cost.opened(str(tiny("llama")), folders) as served:
            assert cost.decode(served, cost.SEVENS) > 0 and cost.prefill(served, cost.TWOS) > 0
            stats = served.stats()
            assert stats.generated_tokens == 16 * 3 + cost.PROMPTS and stats.prompt_tokens == 16 * 3 + cost.PROMPTS * 60


def test_it_prints_every_kind(tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cost, "TOKENS", 2)
    monkeypatch.setattr(cost, "PROMPT", 20)
    cost.main(str(tiny("llama")), 1)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said[1:]] == [what for what, _, _ in cost.KINDS]
