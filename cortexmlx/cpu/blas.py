"""A fast BLAS for MLX's CPU build on Linux.

That build contains the reference BLAS, which is about 70 times slower in float32 than OpenBLAS on the same cores. MLX
calls three CBLAS products by name. So the first library that offers those names and is loaded globally before mlx is
imported serves them: the scipy-openblas32 package with a small forwarding shim (compiled when this package is
installed, if there is a C compiler), or else a system libopenblas. If mlx was imported first, the shim replaces the
addresses that mlx calls (`_rebind.c`). The environment is not changed, and nothing happens on other systems.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

SWITCH = "CORTEXMLX_BLAS"
NEEDED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
LOADAVG = Path("/proc/loadavg")
SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblas.so")


class BlasState(str, Enum):
    """How the attempt to load a fast BLAS ended."""

    FAST = "fast"
    NOT_NEEDED = "not needed"
    SWITCHED_OFF = "switched off"
    TOO_LATE = "too late"
    SLOW = "slow"


@dataclass(frozen=True)
class BlasStatus:
    """The outcome of `preload`, with a line about it for the user, and the library's thread count (0 if unknown)."""

    state: BlasState
    line: str
    threads: int = 0


_SLOWER = "float32 matrix products about 70 times slower"

log = logging.getLogger("cortexmlx")

_status: BlasStatus | None = None
_held: list[ctypes.CDLL] = []
_lock = threading.Lock()


def preload() -> BlasStatus:
    """Load a fast BLAS globally, once. Later calls return the first outcome. Call it before mlx is imported. After
    that, it works only with our shim, and logs a warning if mlx stays slow.

    `CORTEXMLX_BLAS=0` in the environment switches it off.
    """
    global _status
    with _lock:  # engines may open on several threads at once, and each would count the other's threads
        if _status is None:
            _status = _load_blas()
            if _status.state is BlasState.TOO_LATE:
                log.warning("%s", _status.line)
        return _status


def _renew_lock() -> None:
    """Make a new lock in a forked process, because another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def notes() -> tuple[str, ...]:
    """Return a warning for the user if the BLAS is slow, or nothing."""
    slow = _status is not None and _status.state in (BlasState.TOO_LATE, BlasState.SLOW)
    return (_status.line,) if slow and _status is not None else ()


def status() -> str:
    """Return one line about the BLAS in use, for `cortexmlx doctor`. Loads nothing."""
    if _status is not None:
        return _status.line
    return "not loaded yet" if sys.platform == "linux" else _NOT_NEEDED.line


_NOT_NEEDED = BlasStatus(BlasState.NOT_NEEDED, "MLX uses the system's own matrix library")


def _load_blas() -> BlasStatus:
    """Try each way to load a fast BLAS, and return the outcome."""
    if sys.platform != "linux":
        return _NOT_NEEDED
    if os.environ.get(SWITCH) == "0":
        return BlasStatus(BlasState.SWITCHED_OFF, f"reference BLAS (slow): {SWITCH}=0 switches the fast one off")
    problems: list[str] = []
    threads = _choose_thread_count()
    mlx_imported = "mlx.core" in sys.modules
    for attempt in (_load_packaged,) if mlx_imported else (_load_packaged, _load_installed):
        outcome = attempt(problems, threads)
        if outcome is not None:
            return _redirect_mlx(outcome) if mlx_imported else outcome
    if mlx_imported:
        return _too_late_status("; ".join(problems))
    return BlasStatus(BlasState.SLOW, f"reference BLAS ({_SLOWER}): {'; '.join(problems)}")


def _redirect_mlx(loaded: BlasStatus) -> BlasStatus:
    """Make an already imported mlx call the loaded BLAS. Return the outcome."""
    take_over = getattr(_held[-1], "cortexmlx_take_over", None)
    if take_over is None:
        return _too_late_status("the shim is an older version's: install cortexmlx again")
    if take_over() != len(NEEDED):
        return _too_late_status("this mlx calls its BLAS in a way that cannot be changed later")
    return loaded


def _too_late_status(reason: str) -> BlasStatus:
    """Return the status for an mlx that was imported too early to be changed."""
    return BlasStatus(
        BlasState.TOO_LATE,
        f"reference BLAS ({_SLOWER}): mlx was imported before cortexmlx, and {reason}. Begin the program with: "
        "from cortexmlx.cpu import blas; blas.preload()",
    )


def _load_packaged(problems: list[str], threads: int | None) -> BlasStatus | None:
    """Load OpenBLAS from scipy-openblas32, through our shim. Return None and extend `problems` if that fails."""
    shim = _shim_path()
    if shim is None:
        problems.append(
            "the shim was not built: install a C compiler, then cortexmlx again: `pip install -e .` in the clone"
        )
        return None
    package = importlib.util.find_spec("scipy_openblas32")
    folders = (package.submodule_search_locations or []) if package else []
    libraries = [
        library_path
        for folder in folders
        for library_path in sorted(Path(folder, "lib").glob("libscipy_openblas*.so*"))
    ]
    if not libraries:
        problems.append("`pip install scipy-openblas32` brings OpenBLAS")
        return None
    try:
        library = ctypes.CDLL(str(libraries[0]), mode=ctypes.RTLD_GLOBAL)
        _held.extend((library, ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)))
    except OSError as error:
        problems.append(f"scipy-openblas32 cannot be loaded: {error}")
        return None
    return _configure_library(library, "scipy_openblas", "scipy-openblas32", threads)


def _load_installed(problems: list[str], threads: int | None) -> BlasStatus | None:
    """Load a system libopenblas that has CBLAS, or return None. Add those without CBLAS to `problems`."""
    for name in SYSTEM_LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if all(hasattr(library, symbol) for symbol in NEEDED):
            _held.append(ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL))
            return _configure_library(library, "openblas", name, threads)
        problems.append(f"the system's {name} has no CBLAS")
    return None


def _shim_path() -> Path | None:
    """Return the path of the compiled BLAS shim; None if it was not built."""
    spec = importlib.util.find_spec("cortexmlx.cpu._blas_shim")
    return Path(spec.origin) if spec and spec.origin else None


def _choose_thread_count() -> int | None:
    """Return how many threads the BLAS should use; None if the user has chosen. Call it before the library is loaded:
    its own threads spin from then on, and would be counted as other programs' busy threads.
    """
    if "OPENBLAS_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in os.environ:
        return None
    return idle_cpus(usable_cpus(), os.cpu_count() or 1, count_busy_threads())


def _configure_library(library: ctypes.CDLL, prefix: str, source: str, threads: int | None) -> BlasStatus:
    """Set the number of threads of a loaded OpenBLAS, and return the status that names its `source`."""
    set_threads = getattr(library, f"{prefix}_set_num_threads", None)
    if threads is not None and set_threads is not None:
        set_threads(threads)
    get_threads = getattr(library, f"{prefix}_get_num_threads", None)
    thread_count = int(get_threads()) if get_threads is not None else 0
    threads_text = f", {thread_count} thread{'s' if thread_count != 1 else ''}" if thread_count else ""
    return BlasStatus(BlasState.FAST, f"OpenBLAS from {source}{threads_text}", thread_count)


def idle_cpus(usable: int, cpus: int, busy_threads: int) -> int:
    """Return how many CPUs are idle if `busy_threads` threads want to run: at least one, at most `usable`.

    OpenBLAS's threads wait for each other at every product. If one of them does not get a CPU at once, all of them
    wait: two threads on a busy machine with two CPUs were measured at a tenth of the speed of one.
    """
    return max(1, min(usable, cpus - busy_threads))


def count_busy_threads() -> int:
    """Return how many threads on this machine, other than this one, want to run now: the median of five readings in
    16 ms. The load average would still count threads that ended a minute ago.
    """
    counts = []
    for look in range(5):
        if look:
            time.sleep(0.004)
        try:
            counts.append(int(LOADAVG.read_text().split()[3].split("/")[0]) - 1)
        except (OSError, ValueError, IndexError):
            return round(os.getloadavg()[0])
    return max(0, sorted(counts)[len(counts) // 2])


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, or its container's quota if that is lower."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cpus
