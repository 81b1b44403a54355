"""One engine beside mlx-lm that loads the model for each adapter: both do all of the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine
from cortexmlx.bench.studies.adapters import reload
from cortexmlx.bench.studies.adapters.random_adapters import SEVEN, layer_sizes, write_mlx_lm_adapter


def test_both_answer_all_requests(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "TOKENS", 3)
    with Engine(tiny("llama"), kv_memory="1MB", max_rows=32) as engine:
        sizes, vocab = layer_sizes(engine, SEVEN), engine.info.vocab_size
        folders = [write_mlx_lm_adapter(tmp_path / str(number), sizes, 4, number) for number in range(reload.ADAPTERS)]
        assert reload.together(engine, folders).wall > 0
        assert engine.stats().requests_finished == reload.REQUESTS and len(engine.adapters) == reload.ADAPTERS
    theirs = reload.one_by_one(str(tiny("llama")), folders, vocab)
    assert theirs.wall > 0 and theirs.cpu > 0
    asked = reload.prompts(vocab)
    assert len({tuple(prompt[:8]) for prompt in asked}) == len(asked) == reload.REQUESTS


def test_it_prints_both(tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reload, "TOKENS", 2)
    reload.main(str(tiny("llama")))
    assert len(capsys.readouterr().out.splitlines()) == 3
