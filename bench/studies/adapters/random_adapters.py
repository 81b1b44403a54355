"""Adapters with random numbers for a model, written in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cortexmlx.engine import Engine

ATTENTION = ("q_proj", "v_proj")
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layer_sizes(engine: Engine, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of the layers whose names end with one of the `targets`, by name."""

    def sizes(core: Any) -> dict[str, tuple[int, int]]:
        from cortexmlx.execution.adapters.places import linear_layers, linear_size

        layers = linear_layers(core.loaded.model)
        return {
            name: size
            for name, module in layers.items()
            if name.rpartition(".")[2] in targets and (size := linear_size(module)) is not None
        }

    return engine.inspect(sizes)


def write_adapter(folder: Path, sizes: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write an adapter of small random numbers, and return its folder."""
    from safetensors.numpy import save_file

    dice = np.random.default_rng(seed)
    tensors = {}
    for name, (ins, outs) in sizes.items():
        for half, shape in (("A", (rank, ins)), ("B", (outs, rank))):
            numbers = dice.standard_normal(shape, np.float32) * np.float32(0.02)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = numbers
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
