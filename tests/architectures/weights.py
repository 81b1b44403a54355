"""Random weights with which a model computes something: its answers do not repeat themselves, its gates are half open,
what its recurrent layers keep fades within some ten tokens, and no two experts or tokens are equally good.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from cortexmlx.mlx_lm.package import import_mlx_lm_utils
from support.models.tiny import write_tokenizer
from tests.architectures.configurations import configuration

GAIN = 2.0
"""How much larger than what keeps a vector's length the matrices are: attention is then neither flat nor one token."""


def write_model(folder: Path, name: str, seed: int = 0, gain: float = GAIN) -> Path:
    """Write a tiny model of type `name` to `folder`, in the layout of the model hub."""
    config = configuration(name)
    mx.random.seed(seed)
    model_class, args_class = import_mlx_lm_utils()._get_classes(config)
    model = model_class(args_class.from_dict(config))
    parameters = dict(tree_flatten(model.parameters()))
    embeddings = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    # Embeddings that are the answer's matrix, too, would find the token just read if they outweighed what layers add.
    small = 0.5 if any("lm_head" in path for path in parameters) else 0.15
    rng = np.random.default_rng(seed)
    weights = {
        path: _array(small * rng.standard_normal(array.shape))
        if path in embeddings
        else _weight(rng, path, array, gain)
        for path, array in parameters.items()
    }
    write_folder(folder, config, weights)
    return folder


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """A folder in the layout of the model hub."""
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def _weight(rng: np.random.Generator, path: str, initial: mx.array, gain: float) -> mx.array:
    """Random numbers in the place of a parameter, by its name and its shape."""
    shape = initial.shape
    if not mx.issubdtype(initial.dtype, mx.floating):
        return mx.array(rng.integers(0, 256, (*shape, initial.itemsize), np.uint8)).view(initial.dtype)[..., 0]
    noise = rng.standard_normal(shape)
    last = path.rpartition(".")[2]
    if last == "A_log":  # how fast a state fades
        return _array(rng.uniform(-3.0, -0.5, shape))
    if last == "dt_bias":
        return _array(0.5 * noise - 0.5)
    if last == "a_param":
        return _array(0.5 * noise - 2.5)
    if "conv" in path and len(shape) == 3:
        return _array(noise / math.sqrt(shape[1] * shape[2]))
    if math.prod(shape[:-1]) > 1:
        return _array(gain * noise / math.sqrt(shape[-1]))
    # What scales a norm, a bias, a mixture: around what the class begins with.
    return _array(np.array(initial.astype(mx.float32)) + 0.2 * noise)


def _array(values: npt.NDArray[np.float64]) -> mx.array:
    return mx.array(values.astype(np.float32))
