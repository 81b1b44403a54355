"""Checkpoints of tiny models that have kept their draft head, in the layouts that makers and converters write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from support.models.tiny import BASE, CONFIGS, write_tiny

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


LAST_LAYERS: dict[str, dict[str, Any]] = {
    "glm4_moe": BASE
    | {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": CONFIGS["deepseek_v3"]
    | {"first_k_dense_replace": 60, "n_routed_experts": 4, "num_hidden_layers": 61},  # a number that mlx-lm's class has
    "glm4_moe_lite": CONFIGS["deepseek_v3"]
    | {"model_type": "glm4_moe_lite", "first_k_dense_replace": 1, "n_routed_experts": 4, "rope_scaling": None},
}
"""Models whose head is one layer more."""


def write_last_layer(folder: Path, name: str) -> Path:
    """Write the model `LAST_LAYERS[name]` and, as its maker would, one layer more, which is the head. Return the folder
    of mlx-lm's own model with that layer.
    """
    layers = LAST_LAYERS[name]["num_hidden_layers"]
    whole = write_tiny(folder.with_name("whole"), "llama", **LAST_LAYERS[name] | {"num_hidden_layers": layers + 1})
    tensors, head = mx.load(str(whole / "model.safetensors")), f"model.layers.{layers}"
    rng = np.random.default_rng(3)
    added = {part: 1 + 0.1 * rng.standard_normal(32) for part in ("enorm", "hnorm", "shared_head.norm")}
    added["eh_proj"] = rng.standard_normal((32, 64)) / 8
    tensors |= {f"{head}.{part}.weight": mx.array(value.astype(np.float32)) for part, value in added.items()}
    for part, source in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"{head}.{part}.weight"] = tensors[f"{source}.weight"]
    at = f"{head}.self_attn"
    if f"{at}.embed_q.weight" in tensors:
        keys, values = (tensors.pop(f"{at}.{part}.weight") for part in ("embed_q", "unembed_out"))
        joined = mx.concatenate([keys.swapaxes(1, 2), values], axis=1)
        tensors[f"{at}.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
    shutil.copytree(whole, folder)
    (folder / "config.json").write_text(json.dumps(LAST_LAYERS[name]))
    tensors |= split_experts({path: tensors.pop(path) for path in list(tensors) if "switch_mlp" in path})
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    return whole


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
