"""How much memory this machine has for a model: no mlx needed, except on Apple Silicon to ask Metal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """Bytes of physical memory, or of the container's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *filter(None, map(_limit, _CGROUP_LIMITS))])


def _limit(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such control group, or "max": no limit
        return None


def working_set_bytes() -> int:
    """Bytes that a model and its cache should use at most: what Metal recommends, else three quarters of the memory."""
    if sys.platform == "darwin":
        import mlx.core as mx

        if mx.metal.is_available():
            return int(mx.device_info()["max_recommended_working_set_size"])
    return memory_bytes() * 3 // 4
