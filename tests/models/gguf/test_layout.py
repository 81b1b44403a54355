"""The names of a GGUF file's tensors: every one is known, none is missing."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from cortexmlx.models.gguf.config import describe_model
from cortexmlx.models.gguf.file import read_gguf_header
from cortexmlx.models.gguf.load import map_parameter_names
from support.gguf.models import metadata, tensors, write_model
from support.gguf.writer import write_gguf


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    stored = tensors("F32") | {"blk.0.attn_sinks.weight": ("F32", (4,), bytes(16))}
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelUnsupported, match="attn_sinks"):
        load_model(path)


def test_a_missing_tensor_is_corrupt(tmp_path: Path) -> None:
    stored = tensors("F32")
    del stored["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelCorrupt, match=r"blk\.1\.ffn_up"):
        load_model(path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_names_are_those_of_the_parameters_of_mlx_lm(tmp_path: Path, architecture: str, tied: bool) -> None:
    from mlx.utils import tree_flatten

    header = read_gguf_header(
        write_model(tmp_path / "tiny.gguf", architecture, bias=architecture == "qwen2", tied=tied)
    )
    description = describe_model(header)
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(description.config))
    names = map_parameter_names(header, description)
    assert set(names.values()) == {name for name, _ in tree_flatten(model.parameters())}
    assert set(names) == set(header.tensors) and len(set(names.values())) == len(names)
    assert names["blk.1.attn_q.weight"] == "model.layers.1.self_attn.q_proj.weight"


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    stored = tensors("F32")
    stored["blk.0.attn_k.weight"] = stored["blk.0.attn_q.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelCorrupt, match=r"'blk\.0\.attn_k\.weight' has the shape \(64, 64\), not \(32, 64\)"):
        load_model(path)


@pytest.mark.parametrize("number", ["00", "9" * 5000, "\u0660"])
def test_a_layer_is_counted_in_plain_numbers(tmp_path: Path, number: str) -> None:
    """Else two tensors could be one layer's, and the last one read would be used."""
    stored = tensors("F32")
    stored[f"blk.{number}.attn_q.weight"] = stored["blk.0.attn_q.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), stored)
    with pytest.raises(ModelUnsupported, match="has a tensor"):
        load_model(path)
