"""How much memory this machine has, and turning weights into float32 where that pays."""

from __future__ import annotations

import os
import sys
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


def should_dequantize(parameters: int) -> bool:
    """Whether float32 weights pay: on a Linux CPU only, and when they take under a quarter of the memory.

    MLX's CPU matrix products are fast in float32 through BLAS and slow in every other type.
    """
    import mlx.core as mx

    on_cpu = sys.platform == "linux" and mx.default_device() == mx.cpu
    return on_cpu and parameters * 4 < machine_memory() / 4


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
