"""An adapter's folder, read before any model: what is damaged or not known is named in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import CortexError, ModelCorrupt, ModelNotFound, ModelUnsupported
from cortexmlx.models.adapters.files import AdapterKind, read_adapter
from support.models.adapters import write_adapter
from support.models.tiny import write_tiny


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a", write_tiny(tmp_path / "m"))


def refused(folder: Path, error: type[CortexError], *words: str) -> None:
    with pytest.raises(error) as caught:
        read_adapter(folder)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def configure(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_folder_or_its_weights_name_the_adapter(adapter: Path) -> None:
    read = read_adapter(str(adapter / "adapters.safetensors"))
    assert (read.path, read.kind, read.num_layers, read.base) == (adapter, AdapterKind.LORA, 1, "org/base")
    assert read.settings["dropout"] == 0, "what training drops stays when it answers"
    assert read.shapes["model.layers.1.self_attn.q_proj.lora_a"] == (32, 4)
    assert read.added_bytes == (adapter / "adapters.safetensors").stat().st_size


def test_what_is_not_there_is_named(tmp_path: Path, adapter: Path) -> None:
    refused(tmp_path / "none", ModelNotFound, "no adapter", "adapter_config.json")
    refused(tmp_path / "m", ModelNotFound, "no adapter_config.json")
    (adapter / "adapters.safetensors").unlink()
    refused(adapter, ModelCorrupt, "no adapters.safetensors")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_configuration(adapter: Path, content: str) -> None:
    (adapter / "adapter_config.json").write_text(content)
    refused(adapter, ModelCorrupt, "adapter_config.json")


@pytest.mark.parametrize("kept", [0, 7, 60, -1])
def test_weights_that_are_cut_short(adapter: Path, kept: int) -> None:
    file = adapter / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(adapter, ModelCorrupt, "adapters.safetensors", "Download it again")


def test_weights_of_nothing(adapter: Path) -> None:
    import mlx.core as mx

    mx.save_safetensors(str(adapter / "adapters.safetensors"), {})
    refused(adapter, ModelCorrupt, "no numbers at all")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_layers": None}, "num_layers None"),
        ({"lora_parameters": None}, "no lora_parameters"),
        ({"lora_parameters": {"rank": 0, "scale": 1}}, "rank 0"),
        ({"lora_parameters": {"rank": 4, "alpha": 16}}, "not alpha"),
        ({"lora_parameters": {"rank": 4, "scale": float("nan")}}, "scale nan"),
        ({"lora_parameters": {"rank": 4, "scale": 1, "keys": [3]}}, "keys [3]"),
        ({"lora_parameters": {"rank": 10**15, "scale": 1}}, "1000000000000000"),
        ({"lora_parameters": {"rank": 4, "scale": 10**400}}, "scale 1000"),
        ({"lora_parameters": {"rank": 4, "scale": 1e300}}, "scale 1e+300"),
    ],
)
def test_settings_that_cannot_be(adapter: Path, changes: dict[str, Any], word: str) -> None:
    configure(adapter, **changes)
    refused(adapter, ModelCorrupt, word)


def test_a_kind_that_is_not_known(adapter: Path) -> None:
    configure(adapter, fine_tune_type="ia3")
    refused(adapter, ModelUnsupported, "'ia3'", "lora, dora and full")


def test_a_path_that_the_system_does_not_take_is_no_adapter() -> None:
    with pytest.raises(ModelNotFound, match=r"cannot look at 'xx.*too long"):
        read_adapter("x" * 5000)
