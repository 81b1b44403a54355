"""What the tests of loading share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def a_linux_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here becomes float32, as on a Linux CPU, wherever the tests run."""
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.models.load._slow_below_float32", lambda: True)
    mx.set_default_device(mx.cpu)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub library's cache, with nothing in it."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"
