"""Dense layers and normalization, and the files of the former."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortexmlx.errors import EmbeddingRefused, ModelCorrupt
from cortexmlx.models.embedding import Normalize, normalize, read_dense
from support.embedding import numpy_transformer
from support.embedding.models import write_dense, write_json


@pytest.mark.parametrize("activation", ["Tanh", "Identity", "ReLU"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_is_that_of_numpy(tmp_path: Path, activation: str, bias: bool) -> None:
    write_dense(tmp_path, 6, 4, activation, bias=bias)
    layer = read_dense(tmp_path, 6)
    vectors = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    right = [numpy_transformer.dense(vector.astype(np.float64), tmp_path) for vector in vectors]
    np.testing.assert_allclose(layer(vectors), right, atol=1e-6)
    assert layer(vectors).dtype == np.float32 and (layer.bias is not None) == bias


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    import mlx.core as mx

    write_dense(tmp_path, 6, 4)
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), {name: array.astype(mx.bfloat16) for name, array in tensors.items()}
    )
    layer = read_dense(tmp_path, 6)
    assert layer.weight.dtype == np.float32
    assert np.abs(layer.weight - np.array(tensors["linear.weight"])).max() < 0.02


def test_normalized_vectors_have_length_one_and_zeros_stay_zeros() -> None:
    vectors = np.array([[3, 4], [0, 0], [1e30, 1e30], [1e-20, 0]], np.float32)
    unit = normalize(vectors)
    np.testing.assert_allclose(unit[0], [0.6, 0.8], atol=1e-7)
    assert (unit[1] == 0).all() and np.isfinite(unit).all()
    np.testing.assert_allclose(np.linalg.norm(unit[2]), 1, atol=1e-6)
    np.testing.assert_array_equal(Normalize()(vectors), unit)


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"activation_function": "torch.nn.modules.activation.GELU"}, EmbeddingRefused, "is GELU, and this version"),
        ({"module_input_name": "token_embeddings"}, EmbeddingRefused, "changes token_embeddings"),
        ({"module_output_name": "other"}, EmbeddingRefused, "not the whole vector"),
        ({"bias": False}, ModelCorrupt, "linear.bias"),
    ],
)
def test_a_layer_that_is_not_known_is_refused(tmp_path: Path, changes: Any, error: type[Exception], why: str) -> None:
    write_dense(tmp_path, 6, 4)
    config = tmp_path / "config.json"
    write_json(config, json.loads(config.read_text()) | changes)
    with pytest.raises(error, match=why):
        read_dense(tmp_path, 6)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_dense(tmp_path, 6, 4)
    with pytest.raises(ModelCorrupt, match=r"for vectors of 7 numbers, and has one of shape \(4, 6\)"):
        read_dense(tmp_path, 7)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ModelCorrupt, match=r"model\.safetensors"):
        read_dense(tmp_path, 6)
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80pickle")
    with pytest.raises(EmbeddingRefused, match=r"has no model\.safetensors: other files of weights.*may run code"):
        read_dense(tmp_path, 6)
