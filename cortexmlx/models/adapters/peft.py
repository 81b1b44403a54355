"""Adapters of Hugging Face's PEFT library, expressed in mlx-lm's terms where the mathematics is the same.

PEFT adds `alpha / r * B A x` to a linear layer's result (`alpha / sqrt(r)` with `use_rslora`), with A `[r, in]` and B
`[out, r]`. mlx-lm adds `scale * x lora_a lora_b` with both transposed. DoRA's magnitudes are the same in both. Any
other setting may change the numbers. So a setting that is not known to be harmless is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from cortexmlx.errors import ModelCorrupt, ModelUnsupported

MODEL_FILE = "adapter_model.safetensors"
MERGE = "merge it into its model (PEFT's merge_and_unload) and convert that"
_PREFIX = "base_model.model."
_PARTS = {
    ".lora_A.weight": ".lora_a",
    ".lora_B.weight": ".lora_b",
    ".lora_magnitude_vector": ".m",
    ".lora_magnitude_vector.weight": ".m",
}

_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
}
"""Settings that are honoured, or that have no effect here. These say only which modules are adapted, as the tensors'
names do too, or how the adapter was trained.
"""

_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin training that leave the model's own weights unchanged."""


_LARGEST = 3.4e38
"""About the largest number of float32."""

_HIGHEST_RANK = 1 << 20
"""More than the number of rows of any layer."""


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a number that layers can multiply with."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def is_rank(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is a rank that a layer can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _HIGHEST_RANK


def is_peft(config: dict[str, Any]) -> bool:
    """Return whether an adapter_config.json was written by PEFT."""
    return "peft_type" in config


def scale_of(where: Path, config: dict[str, Any]) -> float:
    """Return the factor of the adapter's result. Raises ModelUnsupported for anything but LoRA as described above, and
    ModelCorrupt if rank or alpha are not numbers.
    """
    if config["peft_type"] != "LORA":
        raise ModelUnsupported(f"{where} is of PEFT's type {config['peft_type']!r}; LORA alone is read: {MERGE}.")
    strange = [key for key, value in config.items() if key not in _HARMLESS and not _means_nothing(key, value)]
    if strange:
        named = ", ".join(f"{key}={config[key]!r}" for key in sorted(strange))
        raise ModelUnsupported(f"{where} has PEFT settings that are not known here ({named[:200]}): {MERGE}.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not is_rank(rank):
        raise ModelCorrupt(f"{where} has r {rank!r:.40}, which must be a rank of at least 1.")
    if not is_number(alpha):
        raise ModelCorrupt(f"{where} has lora_alpha {alpha!r:.40}, which must be a number.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def renamed(folder: Path, tensors: Iterable[str]) -> dict[str, str]:
    """Return PEFT's name of each tensor by mlx-lm's name. Raises ModelUnsupported for a tensor that is not part of a
    LoRA layer.
    """
    names = {}
    for tensor in tensors:
        ending = next((part for part in _PARTS if tensor.endswith(part)), None)
        if ending is None or not tensor.startswith(_PREFIX):
            raise ModelUnsupported(f"{folder / MODEL_FILE} has {tensor}, which is no part of a LoRA layer: {MERGE}.")
        names[tensor.removeprefix(_PREFIX).removesuffix(ending) + _PARTS[ending]] = tensor
    return names


def _means_nothing(key: str, value: Any) -> bool:
    if key == "init_lora_weights":
        return value in _INITIAL
    return not value or (key == "bias" and value == "none")
