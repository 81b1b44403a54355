"""Adapters with random numbers, written as mlx-lm's training and as PEFT write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

RANK = 4


def write_adapter(
    folder: Path,
    model: Path,
    kind: str = "lora",
    *,
    num_layers: int = 1,
    keys: tuple[str, ...] | None = ("self_attn.q_proj", "mlp.down_proj"),
    scale: float = 2.0,
    rank: int = RANK,
    seed: int = 3,
    **config: Any,
) -> Path:
    """An adapter for the model folder `model`: the layers that mlx-lm would train, with numbers that are not zero."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    network, _ = load_model(model, lazy=True)
    settings = {"rank": rank, "scale": scale, "dropout": 0.3, "keys": None if keys is None else list(keys)}
    network.freeze()
    if kind == "full":
        for layer in network.layers[-num_layers:]:
            layer.unfreeze()
    else:
        linear_to_lora_layers(network, num_layers, settings, use_dora=kind == "dora")
    rng = np.random.default_rng(seed)
    tensors = {
        name: array * 1.1 if name.endswith(".m") or kind == "full" else mx.array(_small(rng, array.shape))
        for name, array in tree_flatten(network.trainable_parameters())
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    written = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": settings, "model": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    return folder


def write_peft_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]], **config: Any
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A PEFT adapter for modules of these (outputs, inputs); gives A and B of each. A DoRA has magnitudes of 1."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(4)
    pairs = {name: (_small(rng, (RANK, ins)), _small(rng, (outs, RANK))) for name, (outs, ins) in shapes.items()}
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        if config.get("use_dora"):
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = np.ones(len(b), np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_alpha": 6,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "r": RANK,
        "rank_pattern": {},
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    return pairs


def _small(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    return (0.3 * rng.standard_normal(shape)).astype(np.float32)
