"""Models that were saved without their output matrix, under transformers' own names."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from cortexmlx.errors import ModelCorrupt
from cortexmlx.models.embedding import lacks_head
from cortexmlx.models.folder import load_folder
from support.embedding.models import flatten, write_embedding
from support.models.tiny import write_tiny


def weights(folder: Path) -> dict[str, np.ndarray]:
    model, _, _, _ = load_folder(folder)
    assert "sanitize" not in vars(model) and "sanitize" not in model
    return {name: np.array(array) for name, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_flat_names_are_found(tmp_path: Path, name: str) -> None:
    whole = weights(write_embedding(tmp_path / "whole", name, flat=False))
    flat = weights(write_embedding(tmp_path / "flat", name))
    assert whole.keys() == flat.keys()
    assert all((whole[key] == flat[key]).all() for key in whole)
    named = mx.load(str(tmp_path / "flat" / "model.safetensors"))
    assert "layers.0.self_attn.q_proj.weight" in named and not any(key.startswith("model.") for key in named)


def test_flat_names_of_a_quantized_model_are_found(tmp_path: Path) -> None:
    import json

    import mlx.nn as nn

    folder = write_embedding(tmp_path, flat=False, hidden_size=64, intermediate_size=64)
    model, _, config, _ = load_folder(folder)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    whole = dict(tree_flatten(model.parameters()))
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))
    flatten(folder)
    found, _, _, _ = load_folder(folder)
    read = dict(tree_flatten(found.parameters()))
    assert read.keys() == whole.keys() and all(mx.array_equal(read[key], whole[key]) for key in read)


def test_a_missing_output_matrix_is_noted_where_embeddings_are_made(tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B: its config.json promises one of its own."""
    folder = write_embedding(tmp_path / "one", tie_word_embeddings=False)
    model, _, _, notes = load_folder(folder)
    assert "lm_head" not in model and any("no output matrix" in note for note in notes)
    _, _, _, notes = load_folder(write_embedding(tmp_path / "other"))
    assert not any("no output matrix" in note for note in notes)


def test_a_chat_model_without_its_output_matrix_stays_damaged(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen3")
    flatten(folder)
    with pytest.raises(ModelCorrupt, match="lm_head"):
        load_folder(folder)
    body = ["model.embed_tokens.weight", "model.norm.weight"]
    untied = {"tie_word_embeddings": False}
    assert not any(lacks_head([*body, head], untied, True) for head in ("lm_head.weight", "output.weight"))
    assert not lacks_head(body, {"tie_word_embeddings": True}, True) and not lacks_head(body, {}, True)
    assert lacks_head(body, untied, True) and not lacks_head(body, untied, False)
