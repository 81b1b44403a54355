"""A launch and its arguments, as bytes, and where MLX would have them begin."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class BufferSpec:
    """One argument: its data (None for an output that starts undefined), its size and that of an element, in bytes.

    `pieces` are the parts of a sparse input that are not zero, by their offset in bytes. The memory begins `offset`
    bytes behind an address of full alignment, and its first element lies `start` bytes into it: strides may
    be negative. `element` is the type in MLX's words, where that is known.
    """

    name: str
    data: npt.NDArray[np.generic] | None
    nbytes: int
    item_bytes: int
    writable: bool = False
    pieces: tuple[tuple[int, npt.NDArray[np.generic]], ...] = ()
    offset: int = 0
    start: int = 0
    element: str = ""


@dataclass(frozen=True)
class Dispatch:
    """One launch: the kernel by its name and the text that findings quote, its arguments, and how many threads run
    (`grid` counts threads, not threadgroups).
    """

    kernel: str
    text: str
    buffers: Sequence[BufferSpec]
    grid: Triple
    threadgroup: Triple


MAX_ALIGNMENT = 256


def host_view(array: mx.array) -> npt.NDArray[np.generic]:
    """The array's memory as NumPy sees it, strides and all; bfloat16 as its bits."""
    mx.eval(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@cache
def _allocations() -> tuple[int, int]:
    """(n, r): MLX's allocator begins every array at an address that is r modulo n; on Linux it is 8 modulo 16."""
    kept = [host_view(mx.zeros((size,), dtype=mx.uint8)) for size in range(1, 4096, 16)]
    starts = [view.ctypes.data for view in kept]
    alignment = MAX_ALIGNMENT
    while len({start % alignment for start in starts}) > 1:
        alignment //= 2
    return alignment, starts[0] % alignment


def offset_of(array: mx.array) -> int:
    """How many bytes behind the start of its buffer the array begins, modulo the alignment that the allocator gives.

    MLX binds a slice at its offset in the buffer of the whole array: `x[1:]` is no more aligned than an element of x.
    """
    alignment, start = _allocations()
    return (host_view(array).ctypes.data - start) % alignment if array.size else 0
