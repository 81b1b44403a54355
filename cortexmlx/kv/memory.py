"""Whether the system gives memory: asked before MLX is, whose CPU build writes through the null pointer of an
allocation that was refused. No mlx.
"""

from __future__ import annotations

import mmap


def obtainable(size: int) -> bool:
    """Whether the system would give this process `size` more bytes now. Takes microseconds and touches none of them.

    It says no at an address space limit (`ulimit -v`), a limit on data, or strict accounting. A system that promises
    more than it has says yes.
    """
    try:
        mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError):
        return False
    return True
