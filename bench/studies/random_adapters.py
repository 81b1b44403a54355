"""Makes LoRA adapters with small random numbers for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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

    dice = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.{name}.lora_{matrix}.weight": dice.standard_normal(shape, np.float32) * np.float32(0.02)
        for name, (ins, outs) in sizes.items()
        for matrix, shape in (("A", (rank, ins)), ("B", (outs, rank)))
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder
