"""What a launch is given: its arguments as bytes, the addresses at which MLX would place them, and simulated memory."""

import ctypes
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.sim.abi import MAX_ARRAYS

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
class LaunchSpec:
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
def _allocator_alignment() -> tuple[int, int]:
    """Return (n, r): MLX's allocator starts arrays at addresses that are r modulo n. On Linux r is 8 and n is 16."""
    kept = [host_view(mx.zeros((size,), dtype=mx.uint8)) for size in range(1, 4096, 16)]
    starts = [view.ctypes.data for view in kept]
    alignment = MAX_ALIGNMENT
    while len({start % alignment for start in starts}) > 1:
        alignment //= 2
    return alignment, starts[0] % alignment


def offset_of(array: mx.array) -> int:
    """Return the array's offset in its buffer, in bytes modulo the allocator's alignment.

    MLX binds a slice at its offset in the buffer of the whole array: `x[1:]` has the alignment of an element of x.
    """
    alignment, start = _allocator_alignment()
    return (host_view(array).ctypes.data - start) % alignment if array.size else 0


# Addresses of simulated buffers. They are so far apart that an index off by gigabytes hits no other buffer.

SLOT = 1 << 36
STAGGER = 1 << 29  # no two buffers are a round number of bytes apart
STACK_BYTES = 1 << 16
MAX_THREADS = 1024
ARRAY_SLOT = 1 << 36  # of a threadgroup array (runtime/arena.h)
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
RELEASE_ABOVE = 8 << 20


def _reserve_addresses(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


def _offset(slot: int) -> int:
    return SLOT // 2 - slot % 32 * STAGGER


class DeviceMemory:
    """Reserved address space in slots of 64 GiB, one buffer in the middle of each. Only touched pages take memory."""

    def __init__(self) -> None:
        self._slots: list[tuple[mmap.mmap, int]] = []
        self._stacks = _reserve_addresses(MAX_THREADS * STACK_BYTES)
        self.stacks = ctypes.addressof(ctypes.c_char.from_buffer(self._stacks))
        self._guard_stacks()
        self._arena = _reserve_addresses(MAX_ARRAYS * ARRAY_SLOT)
        self.arena = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self.lock = threading.Lock()

    def _guard_stacks(self) -> None:
        """Protect the lowest page of each stack, so that a stack cannot grow into the next."""
        protect = ctypes.CDLL(None).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for thread in range(MAX_THREADS):
            protect(self.stacks + thread * STACK_BYTES, mmap.PAGESIZE, 0)

    def place(self, slot: int) -> int:
        """Return the address of the buffer in `slot`, aligned to a page."""
        while len(self._slots) <= slot:
            made = _reserve_addresses(SLOT)
            self._slots.append((made, ctypes.addressof(ctypes.c_char.from_buffer(made)) + _offset(len(self._slots))))
        return self._slots[slot][1]

    def release(self, slot: int, size: int) -> None:
        """Give the pages of a buffer above 8 MiB back to the system. They then read as zeros."""
        if size > RELEASE_ABOVE:
            self._slots[slot][0].madvise(mmap.MADV_DONTNEED, _offset(slot), (size // mmap.PAGESIZE + 2) * mmap.PAGESIZE)


_memory: DeviceMemory | None = None
_guard = threading.Lock()


def device_memory() -> DeviceMemory:
    """Return the process's simulated device memory; reserve it at the first call."""
    global _memory
    with _guard:
        if _memory is None:
            _memory = DeviceMemory()
        return _memory


# Inputs larger than memory: arrays that are zero except for a few written pieces.


@dataclass
class SparseArray:
    """A row-contiguous input of a simulated kernel that is zero except where `put` wrote. Only written pieces take
    memory.

    It has more than 8 MiB and less than 32 GiB, else ValueError: it tests offsets that do not fit in 32 bits.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    pieces: list[tuple[int, npt.NDArray[np.generic]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not RELEASE_ABOVE < self.nbytes < SLOT // 2:
            raise ValueError(
                f"a sparse array has more than {RELEASE_ABOVE} and less than {SLOT // 2} bytes, not {self.nbytes}"
            )

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, zeros included."""
        return self.size * self.dtype.size

    def strides(self) -> list[int]:
        """Row-contiguous strides, in elements."""
        return [prod(self.shape[axis + 1 :]) for axis in range(self.ndim)]

    def put(self, index: Sequence[int], values: mx.array) -> None:
        """Write `values`, flattened, to consecutive elements from `index` on.

        Raises:
            IndexError: the values do not fit.
        """
        at = sum(i * stride for i, stride in zip(index, self.strides(), strict=True))
        if at < 0 or at + values.size > self.size:
            raise IndexError(f"{values.size} elements at {tuple(index)} do not fit in {self.shape}")
        flat = values.astype(self.dtype).reshape(-1)
        bits = np.array(flat.view(mx.uint16) if self.dtype == mx.bfloat16 else flat)
        self.pieces.append((at * self.dtype.size, bits))
