"""The names of a GGUF file's tensors: every one is known, none is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortexmlx.errors import ModelCorrupt, ModelUnsupported
from cortexmlx.models import load_model
from support.gguf_models import metadata, tensors
from support.gguf_writer import write_gguf


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
