"""What comes after pooling: dense layers and normalization, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cortexmlx.errors import EmbeddingRefused, ModelCorrupt
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.safetensors_check import read_header

Vectors = npt.NDArray[np.float32]

_LEAST_LENGTH = 1e-12
"""A shorter vector is divided by this length, as torch's `normalize` does it, so that zeros stay zeros."""

_ACTIVATIONS: Mapping[str, Callable[[Vectors], Vectors]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
}
"""By the name of torch's class."""


@dataclass(frozen=True)
class Normalize:
    """Divides each vector by its length."""

    def __call__(self, vectors: Vectors) -> Vectors:
        """Return the vectors `[n, width]` with length 1."""
        return normalized(vectors)


@dataclass(frozen=True, eq=False)
class Dense:
    """A linear layer and its activation: `activation(x @ weight.T + bias)`."""

    weight: Vectors = field(repr=False)
    """`[out, in] float32`."""
    bias: Vectors | None = field(repr=False)
    """`[out] float32`."""
    activation: str
    """The name of torch's class, such as "Tanh"."""

    def __call__(self, vectors: Vectors) -> Vectors:
        """Return the outputs `[n, out]` for `[n, in]`."""
        out = vectors @ self.weight.T
        return _ACTIVATIONS[self.activation](out if self.bias is None else out + self.bias)


Layer = Dense | Normalize


def normalized(vectors: Vectors) -> Vectors:
    """Return vectors `[n, width]` divided by their lengths."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    unit: Vectors = (vectors / np.maximum(lengths, _LEAST_LENGTH)).astype(np.float32)
    return unit


def read_dense(folder: Path, width: int) -> Dense:
    """Return the dense layer in `folder`, which takes vectors of `width` numbers. Raises ModelCorrupt if its files are
    damaged, and EmbeddingRefused if this version cannot compute it.
    """
    config = read_json_object(folder / "config.json")
    source, target = (config.get(name, "sentence_embedding") for name in ("module_input_name", "module_output_name"))
    if (source, target if target is not None else source) != ("sentence_embedding", "sentence_embedding"):
        raise EmbeddingRefused(f"{folder} changes {source}, and not the whole vector: this version does not compute it")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise EmbeddingRefused(f"the activation of {folder} is {activation}, and this version computes {known}")
    file = folder / "model.safetensors"
    if not file.is_file():
        raise EmbeddingRefused(
            f"{folder} has no model.safetensors: other files of weights, such as pytorch_model.bin, may run code and "
            "are not read. Save the model again with sentence-transformers, which writes safetensors"
        )
    tensors = _read_tensors(file)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != width:
        found = "none" if weight is None else f"one of shape {weight.shape}"
        raise ModelCorrupt(f"{file} should have a linear.weight for vectors of {width} numbers, and has {found}")
    if (bias is None) is bool(config.get("bias", True)) or (bias is not None and bias.shape != weight.shape[:1]):
        raise ModelCorrupt(f"the linear.bias in {file} does not fit its config.json and its linear.weight")
    return Dense(weight, bias, activation)


def _read_tensors(file: Path) -> dict[str, Vectors]:
    import mlx.core as mx

    read_header(file)
    loaded: Any = mx.load(str(file))
    return {name: np.array(array.astype(mx.float32)) for name, array in loaded.items()}
