"""What the tests of loading share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.models.hub import Hub, large_model, serving


@pytest.fixture
def a_linux_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here becomes float32, as on a Linux CPU, wherever the tests run."""
    import mlx.core as mx

    monkeypatch.setattr("cortexmlx.models.load._is_float32_faster", lambda: True)
    mx.set_default_device(mx.cpu)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub library's cache, with nothing in it."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def hub(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model `org/tiny`, whose weights are two large files of 600,000 and 300,000 bytes, and the only one
    that the hub's library knows.
    """
    import huggingface_hub.constants as constants

    with serving(tiny=large_model(tmp_path / "published")) as hub:
        monkeypatch.setattr("cortexmlx.models.hub._FIRST_WAIT_SECONDS", 0.01)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub
