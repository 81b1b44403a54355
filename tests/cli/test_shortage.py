"""The first line of a chat whose model is too large: by how much, and what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.cli import shortage
from cortexmlx.cli.serve.pool import ModelPlanner
from cortexmlx.core.config import EngineConfig
from cortexmlx.kv.sizing import format_bytes
from cortexmlx.models.inventory import LocalModel
from cortexmlx.models.resolve import SourceKind
from support.models.tiny import write_tiny


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and a smaller one."""
    large = write_tiny(tmp_path / "large", vocab_size=4000, hidden_size=64, max_position_embeddings=8192)
    return large, write_tiny(tmp_path / "small")


def machine(monkeypatch: pytest.MonkeyPatch, budget: int, *models: Path) -> None:
    listed = [LocalModel(str(path), SourceKind.FOLDER, path, shortage.stored_bytes(path)) for path in models]
    monkeypatch.setattr(shortage, "working_set_bytes", lambda: budget)
    monkeypatch.setattr(shortage, "list_models", lambda: listed)


def needed(path: Path, tokens: int) -> int:
    return ModelPlanner("m", EngineConfig(str(path))).needed_bytes(tokens)


def test_it_says_by_how_much_and_what_fits(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = folders
    takes, config = needed(large, 4096), EngineConfig(str(large))
    assert takes - needed(large, 0) == 4096 * 2 * 2 * 2 * 8 * 4  # two layers, two heads of 8, keys and values, float32
    assert needed(small, 4096) == needed(small, 512) < takes - 1000  # its context is 512
    machine(monkeypatch, takes, large, small)
    assert shortage.shortage_line(config) == ""
    machine(monkeypatch, takes - 1000, large, small)
    line = shortage.shortage_line(config)
    assert f"takes {format_bytes(takes)} with a text of 4,096 tokens, {format_bytes(1000)} more" in line
    assert f"Of the models here, {small} would fit;" in line
    machine(monkeypatch, takes - 1000, large)
    assert "No model here would fit;" in shortage.shortage_line(config)


def test_what_is_not_known_is_not_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(monkeypatch, 1)
    for model in ("/no/model", "org/name", str(tmp_path)):
        assert shortage.shortage_line(EngineConfig(model)) == ""


def test_a_chat_says_it_first(
    folders: tuple[Path, Path], piped: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large, _ = folders
    machine(monkeypatch, 1000, large)
    piped("hi", "chat", str(large), "--kv-memory", "4MB", "-n", "2", "--no-save")
    assert capsys.readouterr().err.startswith(f"cortexmlx: {large} takes ")
