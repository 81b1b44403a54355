"""This machine's memory and GPU. mlx is imported only to ask about the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import platform
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

from cortexmlx.errors import MemoryRefused

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """Return the bytes of physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *filter(None, map(_read_limit, _CGROUP_LIMITS))])


def _read_limit(path: str) -> int | None:
    """Return the memory limit in a control group's file; None if there is none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such control group, or "max": no limit
        return None


def working_set_bytes() -> int:
    """Return the most bytes a model and its cache should use: Metal's recommendation, or else 3/4 of the memory."""
    if sys.platform == "darwin" and metal_device() is not None:
        import mlx.core as mx

        return int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])
    return memory_bytes() * 3 // 4


def can_allocate(size: int) -> bool:
    """Return whether the system would give this process `size` more bytes now. It takes microseconds and touches no
    memory.

    Ask before MLX allocates: if an allocation is refused, MLX's CPU build writes through its null pointer. The answer
    is no at an address space limit (`ulimit -v`), a limit on data, or strict accounting. A system that promises more
    memory than it has says yes.
    """
    try:
        mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError):
        return False
    return True


_REFUSALS = (
    "unable to allocate",  # [malloc], of all of MLX's allocators
    "[metal::malloc]",  # more than one buffer may have, or more buffers than may be
    "insufficient memory",  # a command buffer of Metal's
    "out of memory",  # CUDA's, and the system's own word for it
)


def is_memory_refusal(error: BaseException) -> bool:
    """Return whether an exception means that memory was refused: ours, Python's, or MLX's (told by its message)."""
    if isinstance(error, MemoryRefused | MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(refusal in message for refusal in _REFUSALS)


def metal_device() -> str | None:
    """Return the name of the Apple GPU that MLX can compute on; None without one.

    An MLX that was built for Metal says that Metal is available even if no GPU can be opened: in some virtual machines,
    and in sessions without one. It raises when the device is asked for.
    """
    import mlx.core as mx

    if not mx.metal.is_available():
        return None
    try:
        return str(mx.device_info(mx.gpu).get("device_name", "Apple GPU"))
    except RuntimeError:
        return None


def trusts_gpu() -> bool:
    """Return whether MLX computes on a physical Apple GPU, where any failure is a fault, not on a virtual machine's."""
    import mlx.core as mx

    name = metal_device()
    return (
        name is not None and mx.default_device() == mx.gpu and "Paravirtual" not in name and not _is_virtual_machine()
    )


def _is_virtual_machine() -> bool:
    """Return whether macOS says that it runs in a virtual machine."""
    if sys.platform != "darwin":
        return False
    try:
        done = subprocess.run(["sysctl", "-n", "kern.hv_vmm_present"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.strip() == "1"


def uses_matrix_units() -> bool:
    """Return whether MLX's matrix products run on the GPU's matrix units: the GPU has some, and this build of MLX has
    kernels for them.

    Where the build cannot be known, the answer is no. Then our prefill kernel computes windows and heads for which MLX
    has no fused attention: its result is checked, and it needs no memory for scores. A wrong no costs speed on an M5.
    After a wrong yes, MLX would write every score, without the units that make this fast.
    """
    return has_matrix_units() and mlx_has_matrix_kernels() is True


def gpu_architecture() -> tuple[int, str] | None:
    """Return the generation and the size of the Apple GPU, such as (13, "s") of "applegpu_g13s"; None without one.

    Sizes are "p" in an iPad or iPhone, "g" in a plain M, "s" in a Pro or Max, "c" and "d" in an Ultra.
    """
    if metal_device() is None:
        return None
    import mlx.core as mx

    match = re.search(r"_g(\d+)(\w?)", str(mx.device_info(mx.gpu).get("architecture", "")))
    return None if match is None else (int(match[1]), match[2])


def has_matrix_units() -> bool:
    """Return whether the GPU has matrix units that the system lets MLX use: M5 and later, from macOS 26.2 on.

    Python cannot call what MLX asks (`is_nax_available`). This asks the same of the GPU's architecture and of Darwin's
    release, 25.2 in macOS 26.2: a Python that was built for an older system is told an older version of macOS.
    """
    architecture = gpu_architecture()
    system = [int(number) for number in re.findall(r"\d+", platform.release())]
    return (
        architecture is not None and architecture[0] >= (18 if architecture[1] == "p" else 17) and system[:2] >= [25, 2]
    )


@cache
def mlx_has_matrix_kernels() -> bool | None:
    """Return whether this build of MLX has kernels for matrix units ("NAX"); None if that cannot be known.

    MLX's wheel for macOS 26 has thousands, those for macOS 14 and 15 none. A build that compiles its kernels when they
    are needed (`MLX_METAL_JIT`) has no products in its library, so the library does not tell. Where no library can be
    read, the wheel's tag may say that there are none.
    """
    import mlx.core as mx

    package = Path(str(mx.__file__)).parent
    # A wheel has it in mlx/lib. Other builds have it beside libmlx: conda in the environment's lib.
    for folder in (package / "lib", package, Path(sys.prefix) / "lib"):
        with (
            contextlib.suppress(OSError, ValueError),
            (folder / "mlx.metallib").open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as kernels,
        ):
            if kernels.find(b"_nax_") >= 0:
                return True
            if kernels.find(b"steel_gemm_") >= 0:
                return False
            break
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        tags = importlib.metadata.distribution("mlx-metal").read_text("WHEEL") or ""
        if (match := re.search(r"macosx_(\d+)_", tags)) is not None and int(match[1]) < 26:
            return False
    return None


def release_freed_memory() -> None:
    """Give freed memory back to the system, in milliseconds. Only glibc, which keeps freed weights, needs this."""
    with contextlib.suppress(OSError, AttributeError):  # no C library of that kind
        ctypes.CDLL(None).malloc_trim(0)


def lower_thread_priority() -> None:
    """Give this thread the lowest priority, if the system can do that for one thread and allows it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
