"""Build kernels as shared libraries with the simulator's runtime. A disk cache keeps them by content."""

import atexit
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab.sim.toolchain import RUNTIME, RUNTIME_FLAGS, SHIM, Build, find_compiler, kernel_flags
from cortexmlx.system import files as folders

MAX_CACHED = 4000


def build(text: str, what_for: Build) -> Path:
    """Compile C++ `text` (rewritten kernel and entry point) with the runtime; return the path of the cached shared
    library.

    Raises:
        KernelCompileError: the compiler refused the text; the message has its first diagnostics.
        ToolchainMissing: no usable compiler.
    """
    compiler = find_compiler()
    flags = kernel_flags(what_for)
    target = cache_folder() / f"{content_key(text, *flags)}.so"
    if target.exists():
        os.utime(target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            source, unit, library = (Path(folder, name) for name in ("kernel.cpp", "kernel.o", "kernel.so"))
            source.write_text(text)
            header = ["-Xclang", "-include-pch", "-Xclang", str(_preamble(tuple(flags)))]
            _execute([*compiler.compile, *flags, *header, "-c", str(source), "-o", str(unit)])
            _execute([*compiler.link, str(unit), str(_runtime_object()), "-o", str(library)])
            _store(library, target)
    return target


@cache
def load(path: Path) -> ctypes.CDLL:
    """Return the built library, loaded into this process."""
    return ctypes.CDLL(str(path))


def cache_folder() -> Path:
    """Return the folder of built kernels: `$CORTEXMLX_SIM_CACHE`, or `sim` in the user's cache folder."""
    return Path(os.environ.get("CORTEXMLX_SIM_CACHE") or folders.cache_folder() / "sim")


def content_key(*parts: str) -> str:
    """Return a cache name: a hash of `parts`, compiler, processor, MLX's version, and the simulator's shim and
    runtime.
    """
    compiler = find_compiler()
    everything = [compiler.identity, _processor(), _own_files(), importlib.metadata.version("mlx"), *parts]
    return hashlib.sha256("\0".join(everything).encode()).hexdigest()[:32]


def prune(folder: Path, most: int = MAX_CACHED) -> None:
    """If the cache has more than `most` files, delete the least recently used ones, down to three quarters of `most`.

    Another process may delete files at the same time.
    """
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) > most:
        files.sort(key=_last_used)
        for path in files[: len(files) - most * 3 // 4]:
            path.unlink(missing_ok=True)


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@cache
def _own_files() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SHIM.rglob("*"), *RUNTIME.iterdir()]):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _preamble(flags: tuple[str, ...]) -> Path:
    """Precompile MLX's preamble and the shim headers for this process. They take half of the time of a small kernel.

    The input has the same path in every process, so zig finds the result in its own cache. The result has no
    timestamps: a new installation of the same headers changes only their times.
    """
    folder = tempfile.mkdtemp(prefix="metal-sim-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header, compiled = SHIM / "sim" / "preamble.h", Path(folder, "preamble.pch")
    once = ["-Xclang", "-fno-pch-timestamp", "-x", "c++-header"]
    _execute([*find_compiler().compile, *flags, *once, str(header), "-o", str(compiled)])
    return compiled


def _runtime_object() -> Path:
    """Return the compiled runtime. Look for it at every call: another process that prunes the cache may have deleted
    it.
    """
    compiler = find_compiler()
    sources = sorted(RUNTIME.glob("*.cpp"))
    target = cache_folder() / f"runtime-{content_key('runtime')}.o"
    if target.exists():
        os.utime(target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unit = Path(folder, "runtime.cpp")
            unit.write_text("".join(f'#include "{source}"\n' for source in sources))
            built = Path(folder, "runtime.o")
            _execute([*compiler.compile, *RUNTIME_FLAGS, "-c", str(unit), "-o", str(built)])
            _store(built, target)
    return target


def _execute(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelCompileError(_readable(done.stderr))


def _readable(diagnostics: str) -> str:
    """Return a message with the first lines of the compiler's output."""
    kept = [line for line in diagnostics.splitlines() if line.strip() and " generated." not in line]
    return "the kernel does not compile:\n" + "\n".join(kept[:40])


def _store(built: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(built, target)
    prune(target.parent)
