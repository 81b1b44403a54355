"""What writing the tier on disk costs: all of it is computed, and half of it written."""

from __future__ import annotations

import pytest

from cortexmlx import Engine
from cortexmlx.bench.studies import disk
from support.patience import soon


def test_every_pair_answers_fresh_prompts_whole_and_writes_those_that_are_kept(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def answer(engine: Engine, prompts: list[list[int]], tokens: int, keep: bool) -> disk.Took:
        took = whole(engine, prompts, tokens, keep)
        assert took.tokens == 2 * tokens and 0 < took.gap < took.wall and engine.stats().cached_tokens == 0
        asked.append((keep, tuple(map(tuple, prompts))))
        kept = sum(kept for kept, _ in asked)
        assert soon(lambda: (store := engine.stats().kv_store) is not None and store.stored_blocks == 4 * kept)
        return took

    whole = disk.answer
    monkeypatch.setattr(disk, "SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(disk, "answer", answer)
    monkeypatch.setattr("sys.argv", ["disk", model, "--pairs", "2", "--rows", "2", "--prompt", "70", "--tokens", "9"])
    disk.main()
    assert [keep for keep, _ in asked] == [True, False, False, True, True, False]
    assert len({prompts for _, prompts in asked}) == 6
    out = capsys.readouterr().out
    assert "2 pairs, 12 blocks written" in out and out.count("x (") == 3
