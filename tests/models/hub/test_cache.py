"""What is in the hub's cache: only what is complete counts."""

from __future__ import annotations

from pathlib import Path

from cortexmlx.models.hub import cached_folder
from support.folders import cached_model


def test_a_folder_counts_when_all_its_weights_are_there(empty_cache: Path) -> None:
    assert cached_folder("org/none") is None
    cached_model(empty_cache, "org/half", complete=False)
    assert cached_folder("org/half") is None
    snapshot = cached_model(empty_cache, "org/whole")
    assert cached_folder("org/whole") == snapshot
    weights = snapshot / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-1])
    assert cached_folder("org/whole") is None
