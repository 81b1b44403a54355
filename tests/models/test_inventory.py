"""List the models on this machine, without the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cortexmlx.models import SourceKind, list_models
from cortexmlx.models.hub import cached_folder
from cortexmlx.models.inventory import stored_bytes
from support.folders import CONFIG, cached_model
from support.gguf.models import write_model


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "4-bit"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mxfp4"),
        ({"text_config": {"quantization": {"bits": 8}}}, "8-bit"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, ""),
    ],
)
def test_a_model_of_the_cache_says_how_it_is_stored_and_its_context(
    changes: dict[str, object], says: str, empty_cache: Path
) -> None:
    snapshot = cached_model(empty_cache, "org/whole")
    (snapshot / "config.json").write_text(json.dumps(CONFIG | changes))
    (model,) = [m for m in list_models() if m.kind is SourceKind.HUB]
    assert (model.quantization, model.context) == (says, 1024)
    assert model.size == stored_bytes(snapshot) == (snapshot / "model.safetensors").stat().st_size


def test_a_gguf_file_counts_with_its_type_and_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_model(tmp_path / "tiny.gguf", type_name="Q8_0")
    monkeypatch.setattr("cortexmlx.models.inventory.starter_path", lambda: file)
    monkeypatch.setattr("cortexmlx.models.inventory._list_hub_cache", lambda: [])
    (model,) = list_models()
    assert (model.size, model.quantization, model.context) == (file.stat().st_size, "Q8_0", 512)
    file.write_bytes(b"GGUF")
    (model,) = list_models()
    assert (model.size, model.quantization, model.context) == (4, "damaged", None)
