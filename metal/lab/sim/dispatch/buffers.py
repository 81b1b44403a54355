"""A launch, its arguments as bytes, and the addresses at which MLX would place them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class BufferSpec:
    """One argument of a launch."""

    name: str
    data: npt.NDArray[np.generic] | None
    """None for an output that starts undefined, and for a sparse input."""
    nbytes: int
    item_bytes: int
    """Bytes of an element."""
    writable: bool = False
    pieces: tuple[tuple[int, npt.NDArray[np.generic]], ...] = ()
    """The written parts of a sparse input, which is zero elsewhere: (offset in bytes, numbers)."""
    offset: int = 0
    """Bytes from a fully aligned address to the start of the memory."""
    start: int = 0
    """Bytes from the start of the memory to the first element. More than 0 if strides are negative."""
    element: str = ""
    """MLX's name of the element's dtype; empty if unknown."""


@dataclass(frozen=True)
class Dispatch:
    """One launch of a kernel."""

    kernel: str
    """Name of the kernel."""
    text: str
    """The kernel text that findings quote."""
    buffers: Sequence[BufferSpec]
    grid: Triple
    """Threads, not threadgroups, in each dimension."""
    threadgroup: Triple
    """Threads of a threadgroup in each dimension."""


MAX_ALIGNMENT = 256


def host_view(array: mx.array) -> npt.NDArray[np.generic]:
    """Return the array's memory as a NumPy view with the same strides; bfloat16 as its bits."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@cache
def _allocations() -> tuple[int, int]:
    """Return (n, r): MLX's allocator starts every array at an address that is r modulo n. On Linux r is 8 and n
    is 16.
    """
    kept = [host_view(mx.zeros((size,), dtype=mx.uint8)) for size in range(1, 4096, 16)]
    starts = [view.ctypes.data for view in kept]
    alignment = MAX_ALIGNMENT
    while len({start % alignment for start in starts}) > 1:
        alignment //= 2
    return alignment, starts[0] % alignment


def offset_of(array: mx.array) -> int:
    """Return the bytes from the start of its buffer to the array, modulo the allocator's alignment.

    MLX binds a slice at its offset in the buffer of the whole array: `x[1:]` has the alignment of an element of x.
    """
    alignment, start = _allocations()
    return (host_view(array).ctypes.data - start) % alignment if array.size else 0
