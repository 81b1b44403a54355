"""From what a person names to a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cortexmlx.cli.start import run
from support.published import QWEN3_8B


def test_of_a_hub_id_only_the_configuration_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from cortexmlx.models import hub

    def download(repo: str, files: list[str]) -> Path:
        assert (repo, files) == ("org/Qwen3-8B", ["config.json"])
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
        return tmp_path

    monkeypatch.setattr(hub, "cached_folder", lambda repo: None)
    monkeypatch.setattr(hub, "_download", download)
    assert run(["plan", "org/Qwen3-8B"]) == 0
    assert "  weights         15.3 GiB    as stored\n  KV per token    144 KiB " in capsys.readouterr().out
