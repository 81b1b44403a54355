"""Float32 for MLX's CPU build, whose matrix products are fast in that type (through BLAS) and slow in every other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(limit_file).read_text())
        except (OSError, ValueError):
            continue
        total = min(total, limit)
    return total


def to_float32(model: Any) -> None:
    """Replace the model's quantized layers by plain ones and make every floating parameter float32, in place.

    Scales are widened before the weights are expanded, so no bit is lost on the way.
    """
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def activations_to_float32(model: Any) -> None:
    """Make every floating parameter float32, in place, so that activations are too; packed weights stay packed."""
    import mlx.core as mx

    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def is_quantized(model: Any) -> bool:
    """Whether any layer holds packed weights."""
    return any(hasattr(module, "bits") for _, module in model.named_modules())
