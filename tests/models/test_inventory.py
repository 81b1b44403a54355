"""What models are on this machine, without asking the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.models import SourceKind, list_models
from cortexmlx.models.hub.cache import cached_folder
from support.folders import cached_model


def test_complete_models_in_the_hub_cache_are_listed_and_found_without_network(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [m for m in list_models() if m.kind is SourceKind.HUB] == []
    snapshot = cached_model(empty_cache, "org/whole")
    cached_model(empty_cache, "org/half", complete=False)
    listed = [m for m in list_models() if m.kind is SourceKind.HUB]
    assert [(m.name, m.path) for m in listed] == [("org/whole", snapshot)]
    assert listed[0].size > 0
    assert cached_folder("org/whole") == snapshot
    assert cached_folder("org/half") is None and cached_folder("org/none") is None
