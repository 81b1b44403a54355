"""Checkpoints of tiny models that have kept their draft head, in the layouts that makers and converters write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from support.models.tiny import write_tiny

Tensors = dict[str, mx.array]

NORMS = ("layernorm.weight", "q_norm.weight", "k_norm.weight")
PRE_FC_NORMS = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


def write_draft_head(
    folder: Path,
    name: str,
    *,
    raw: bool = False,
    prefix: str = "mtp.",
    store: Callable[[Tensors], Tensors] = dict,
    last_norm: float = 1.2,
) -> Tensors:
    """Write the tiny model `name` with a random draft head. Return the head's tensors as they are computed with, under
    the names of mlx-lm's layer.

    `raw`: the model as its maker writes it, with norms less 1, other axes of convolutions, and experts as they come.
    `store` turns the head's tensors into what is written, under names that begin with `prefix`.
    `last_norm` is the mean of the head's last norm.
    """
    write_tiny(folder, name)
    file = folder / "model.safetensors"
    tensors = mx.load(str(file))
    mx.eval(tensors)
    head = _random_head(load_model(folder)[0].layers[1], last_norm)
    if raw:
        tensors = less_one(tensors, *NORMS, "model.norm.weight")
        tensors = {path: value.moveaxis(1, 2) if "conv1d" in path else value for path, value in tensors.items()}
        tensors = fuse_experts(tensors) if name == "qwen3_5_moe" else split_experts(tensors)
    stored = {prefix + path: value for path, value in store(dict(head)).items()}
    mx.save_safetensors(str(file), {**tensors, **stored}, metadata={"format": "pt" if raw else "mlx"})
    return head


def _random_head(full_layer: Any, last_norm: float) -> Tensors:
    """Return random tensors of a head whose layer has the shapes of `full_layer`."""
    shapes = {f"layers.0.{path}": value.shape for path, value in tree_flatten(full_layer.parameters())}
    size = full_layer.input_layernorm.weight.shape[0]
    shapes |= dict.fromkeys(("norm.weight", *PRE_FC_NORMS), (size,)) | {"fc.weight": (size, 2 * size)}
    means = dict.fromkeys(PRE_FC_NORMS, 0.4) | {"norm.weight": last_norm}
    rng, head = np.random.default_rng(7), {}
    for path, shape in shapes.items():
        values = rng.standard_normal(shape)
        if len(shape) == 1:
            values = means.get(path, 1.2) + 0.1 * values
        else:
            values *= shape[-1] ** -0.5
        head[path] = mx.array(values.astype(np.float32))
    return head


def less_one(tensors: Tensors, *ends: str) -> Tensors:
    """Return the tensors with 1 less in those whose names end in one of `ends`."""
    return {path: value - 1 if path.endswith(ends) else value for path, value in tensors.items()}


def as_made(head: Tensors) -> Tensors:
    """Return a head's tensors as makers write its norms: each less 1."""
    return less_one(head, *NORMS, *PRE_FC_NORMS) | {"norm.weight": head["norm.weight"] - 1}


def split_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with one of each expert, as in Qwen3-Next."""
    split: Tensors = {}
    for path, value in tensors.items():
        if "switch_mlp" in path:
            split |= {path.replace("switch_mlp", f"experts.{i}"): value[i] for i in range(value.shape[0])}
        else:
            split[path] = value
    return split


def fuse_experts(tensors: Tensors) -> Tensors:
    """Return the tensors with the experts' gate and up projections in one, as in Qwen3.6."""
    fused = {path: value for path, value in tensors.items() if "switch_mlp" not in path}
    for path, down in tensors.items():
        stem, _, part = path.partition(".switch_mlp.")
        if part == "down_proj.weight":
            pair = [tensors[f"{stem}.switch_mlp.{name}_proj.weight"] for name in ("gate", "up")]
            fused[f"{stem}.experts.gate_up_proj"] = mx.concatenate(pair, axis=1)
            fused[f"{stem}.experts.down_proj"] = down
    return fused


def pack(tensors: Tensors, bits: Callable[[str], int]) -> Tensors:
    """Return the tensors with matrices packed by MLX in groups of 32 and `bits(path)`, where rows have whole groups."""
    packed: Tensors = {}
    for path, value in tensors.items():
        parts = mx.quantize(value, group_size=32, bits=bits(path)) if _is_packable(value) else (value,)
        names = (path, path.replace(".weight", ".scales"), path.replace(".weight", ".biases"))
        packed |= dict(zip(names, parts, strict=False))
    return packed


def rounded(tensors: Tensors, bits: Callable[[str], int]) -> Tensors:
    """Return the values that remain of the tensors once they are packed by `pack`."""
    values: Tensors = {}
    for path, value in tensors.items():
        how = {"group_size": 32, "bits": bits(path)}
        values[path] = mx.dequantize(*mx.quantize(value, **how), **how) if _is_packable(value) else value
    return values


def _is_packable(value: mx.array) -> bool:
    """Return whether a tensor is a matrix with rows of whole groups."""
    return value.ndim == 2 and value.shape[1] % 32 == 0


def split_into_shards(folder: Path) -> None:
    """Write the model's file as one of the model, one of the head, and an index."""
    tensors = mx.load(str(folder / "model.safetensors"))
    mx.eval(tensors)
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{2 if 'mtp.' in name else 1}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in tensors if files[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
