"""What tests of several hosts share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cortexmlx.distributed.launch import processes
from cortexmlx.kv import sizing
from support.patience import PATIENCE


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for temporary files, in which nothing may be left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def news(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's last words are awaited, however slow the machine is."""
    monkeypatch.setattr(processes, "_NEWS_SECONDS", PATIENCE)


@pytest.fixture
def small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas begin with a few blocks, so that they grow soon."""
    monkeypatch.setattr(sizing, "_INITIAL_TOKENS", 96)
