"""A store whose model's weights are still being hashed when the engine is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.store import file_hash
from support.hash_gate import hash_gate
from support.patience import PATIENCE
from support.stored import Stored


def test_an_engine_is_open_before_its_weights_are_hashed(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[bool] = []
    with hash_gate(monkeypatch) as gate:

        def noted(source: Any, digest: Any, begin: int, end: int) -> None:
            late.append(not gate.opened.wait(PATIENCE))

        monkeypatch.setattr(file_hash._FileSource, "add", noted)
        with Stored(tiny("llama"), tmp_path):
            gate.opened.set()
    assert not any(late), "opening waited for the hash"
