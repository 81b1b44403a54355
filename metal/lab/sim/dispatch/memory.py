"""Addresses of simulated buffers. They are so far apart that an index off by gigabytes hits no other buffer."""

import ctypes
import mmap
import threading

from cortexmlx.metal.lab.sim.dispatch.abi import MAX_ARRAYS

SLOT = 1 << 36
STAGGER = 1 << 29  # no two buffers are a round number of bytes apart
STACK_BYTES = 1 << 16
MAX_THREADS = 1024
ARRAY_SLOT = 1 << 36  # of a threadgroup array (runtime/arena.h)
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
RELEASE_ABOVE = 8 << 20


def _reserve(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)


def _middle(slot: int) -> int:
    return SLOT // 2 - slot % 32 * STAGGER


class DeviceMemory:
    """Reserved address space in slots of 64 GiB, with one buffer in the middle of each. Only touched pages take
    memory.
    """

    def __init__(self) -> None:
        self._slots: list[tuple[mmap.mmap, int]] = []
        self._stacks = _reserve(MAX_THREADS * STACK_BYTES)
        self.stacks = ctypes.addressof(ctypes.c_char.from_buffer(self._stacks))
        self._guard_stacks()
        self._arena = _reserve(MAX_ARRAYS * ARRAY_SLOT)
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
            made = _reserve(SLOT)
            self._slots.append((made, ctypes.addressof(ctypes.c_char.from_buffer(made)) + _middle(len(self._slots))))
        return self._slots[slot][1]

    def release(self, slot: int, size: int) -> None:
        """Give the pages of a buffer above 8 MiB back to the system. They then read as zeros."""
        if size > RELEASE_ABOVE:
            self._slots[slot][0].madvise(mmap.MADV_DONTNEED, _middle(slot), (size // mmap.PAGESIZE + 2) * mmap.PAGESIZE)


_memory: DeviceMemory | None = None
_guard = threading.Lock()


def device_memory() -> DeviceMemory:
    """Return the process's simulated device memory; reserve it at the first call."""
    global _memory
    with _guard:
        if _memory is None:
            _memory = DeviceMemory()
        return _memory
