"""Makes LoRA adapters with small random numbers for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cortexmlx.engine import Engine

ATTENTION = ("q_proj", "v_proj")


def layer_sizes(engine: Engine, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of the layers whose names end with one of the `targets`, by name."""

    def sizes(core: Any) -> dict[str, tuple[int, int]]:
        from cortexmlx.execution.adapters import linear_layers, linear_size

        layers = linear_layers(core.loaded.model)
        return {
            name: size
            for name, module in layers.items()
            if name.rpartition(".")[2] in targets and (size := linear_size(module)) is not None
        }

    return engine.inspect(sizes)


def write_adapter(folder: Path, sizes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write a random adapter in PEFT's format, and return its folder."""
    from safetensors.numpy import save_file

    tensors = {}
    for name, (a, b) in _draw_matrices(sizes, rank, seed).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"base_model.model.{name}.lora_B.weight"] = np.ascontiguousarray(b.T)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def write_mlx_lm_adapter(folder: Path, sizes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write the same adapter as `write_adapter`, in mlx-lm's format, and return its folder."""
    from safetensors.numpy import save_file

    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, (a, b) in _draw_matrices(sizes, rank, seed).items():
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    keys = sorted({".".join(name.split(".")[3:]) for name in sizes})
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapters.safetensors")
    settings = {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": keys}
    config = {"fine_tune_type": "lora", "num_layers": 10**6, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _draw_matrices(
    sizes: Mapping[str, tuple[int, int]], rank: int, seed: int
) -> dict[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Draw random matrices A and B for each layer."""
    dice = np.random.default_rng(seed)

    def small(*shape: int) -> npt.NDArray[np.float32]:
        return dice.standard_normal(shape, np.float32) * np.float32(0.02)

    return {name: (small(ins, rank), small(rank, outs)) for name, (ins, outs) in sizes.items()}
