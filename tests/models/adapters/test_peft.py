"""PEFT's adapters: plain LoRA and DoRA are told in mlx-lm's terms, every other setting is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortexmlx.errors import CortexError, ModelCorrupt, ModelUnsupported
from cortexmlx.models.adapters.files import read_adapter
from support.models.adapters import write_peft_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (32, 16)}


def test_its_names_and_shapes_are_those_of_mlx_lm(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, SHAPES)
    read = read_adapter(tmp_path)
    stem = "model.layers.0.self_attn.q_proj"
    assert dict(read.shapes) == {f"{stem}.lora_a": (16, 4), f"{stem}.lora_b": (4, 32)}
    assert (read.settings["scale"], read.settings["keys"], read.base) == (1.5, [stem], "org/base")


@pytest.mark.parametrize(
    ("settings", "error", "word"),
    [
        ({"peft_type": "IA3"}, ModelUnsupported, "'IA3'"),
        ({"modules_to_save": ["lm_head"]}, ModelUnsupported, "modules_to_save=['lm_head']"),
        ({"rank_pattern": {"q_proj": 8}}, ModelUnsupported, "rank_pattern"),
        ({"bias": "all"}, ModelUnsupported, "bias='all'"),
        ({"init_lora_weights": "pissa"}, ModelUnsupported, "pissa"),
        ({"alora_invocation_tokens": [3]}, ModelUnsupported, "alora_invocation_tokens"),
        ({"r": "4"}, ModelCorrupt, "r '4'"),
        ({"r": 8}, ModelCorrupt, "rank 8"),
        ({"lora_alpha": None}, ModelCorrupt, "lora_alpha None"),
        ({"lora_alpha": 10**400}, ModelCorrupt, "lora_alpha 1000"),
        ({"r": 10**400}, ModelCorrupt, "r 1000"),
    ],
)
def test_what_is_not_plain_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], error: type[CortexError], word: str
) -> None:
    write_peft_adapter(tmp_path, SHAPES, **settings)
    with pytest.raises(error) as caught:
        read_adapter(tmp_path)
    assert word in str(caught.value)
    assert error is ModelCorrupt or "merge_and_unload" in str(caught.value), "the next step"


def test_tensors_that_are_no_part_of_a_layer_are_named(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    write_peft_adapter(tmp_path, SHAPES)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = next(iter(tensors.values()))
    save_file(tensors, file)
    with pytest.raises(ModelUnsupported, match="lora_embedding_A"):
        read_adapter(tmp_path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    write_peft_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelUnsupported, match="pickle"):
        read_adapter(tmp_path)
