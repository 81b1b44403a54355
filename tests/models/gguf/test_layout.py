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


@pytest.mark.parametrize(
    ("name", "of", "error", "says"),
    [
        ("blk.1.ffn_up", None, ModelCorrupt, r"blk\.1\.ffn_up"),
        ("blk.0.attn_sinks", "blk.0.attn_norm", ModelUnsupported, "attn_sinks"),
        ("blk.0.attn_k", "blk.0.attn_q", ModelCorrupt, r"'blk\.0\.attn_k\.weight' has .* \(64, 64\), not \(32, 64\)"),
        # Else two tensors could be one layer's, and the last one read would be used.
        *((f"blk.{n}.attn_q", "blk.0.attn_q", ModelUnsupported, "has a tensor") for n in ("00", "9" * 5000, "\u0660")),
    ],
    ids=["missing", "unknown", "another shape", "00", "a long number", "another script"],
)
def test_tensors_that_are_missing_unknown_or_of_other_shapes_are_named(
    tmp_path: Path, name: str, of: str | None, error: type[Exception], says: str
) -> None:
    stored = {key: stored for key, stored in tensors("F32").items() if key != f"{name}.weight"}
    stored |= {} if of is None else {f"{name}.weight": stored[f"{of}.weight"]}
    with pytest.raises(error, match=says):
        load_model(write_gguf(tmp_path / "tiny.gguf", metadata(), stored))
