"""From C++ to a loaded library: the compiler and its flags, and a disk cache that keeps built kernels by content."""

import atexit
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from cortexmlx.errors import KernelCompileError, ToolchainMissing
from cortexmlx.system import files as folders

HERE = Path(__file__).parent
SHIM = HERE / "shim"
RUNTIME = HERE / "runtime"

_COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-finite-loops",
    "-fno-stack-protector",
    "-fstack-clash-protection",
    "-ffp-contract=off",
    "-fno-sanitize=all",
]
RUNTIME_FLAGS = [*_COMMON, "-O2", "-g0"]
# A kernel's text sees no macro of this machine or its libraries, only these, which Metal defines, too.
_MACROS = {
    "__clang__": "1",
    "__CHAR_BIT__": "8",
    "__INT_MAX__": "2147483647",
    "__LONG_MAX__": "9223372036854775807L",
    "__FLT_MAX__": "3.40282347e+38F",
    "__FLT_MIN__": "1.17549435e-38F",
    "__FLT_EPSILON__": "1.19209290e-7F",
}
_KERNEL = [
    *_COMMON,
    *(["-DSIM_MACH_O"] if sys.platform == "darwin" else []),
    "-undef",
    "-U__GLIBC_MINOR__",
    *(f"-D{name}={value}" for name, value in _MACROS.items()),
    "-nostdinc",
    "-fdeclspec",
    "-gdwarf-4",
    "-g1",
    "-Wno-everything",
    "-Werror=uninitialized",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-Xclang",
    "-fconvergent-functions",
]
_UNCHECKED = ["-O2", "-fwrapv", "-fmax-type-align=1", "-mllvm", "-unroll-threshold=0"]
_CHECKED = [
    "-O1",
    "-fsanitize=alignment,signed-integer-overflow,integer-divide-by-zero,bounds,shift-exponent,float-cast-overflow,"
    "implicit-integer-truncation",
    "-fno-sanitize-trap=all",
    "-Xclang",
    "-fsanitize=kernel-address",
]
_HOOKS: dict[str, int | str] = {
    "asan-instrumentation-with-call-threshold": 0,
    "asan-stack": 0,
    "asan-globals": 0,
    "asan-opt-same-temp": 0,
    "asan-mapping-scale": 4,  # an access of 16 bytes that is aligned to 8 comes through the hook for any size
    "asan-kernel-mem-intrinsic-prefix": 1,
    "disable-loop-idiom-all": 1,
    "unroll-threshold": 0,  # unrolled loops with a hook at each access took three quarters of the compiler's time
    "inline-threshold": 5000,
    # Do not move an unconditional load into the one branch that uses it: the load may be out of bounds.
    "instcombine-code-sinking": "false",
}


class Build(Enum):
    """The ways to compile a kernel. Uninitialised variables hold a pattern (NaN in floats); in ZEROED, zeros."""

    CHECKED = "every access calls a hook"
    FAST = "nothing is watched"
    ZEROED = "as FAST, with zeros in such variables"


@dataclass(frozen=True)
class Clang:
    """A clang: the commands that compile and that link a shared library, and a text that identifies the compiler."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    identity: str


_PROBE = """
typedef float float4 __attribute__((ext_vector_type(4)));
float4 f(float4 a, _Float16 h, __bf16 b) { a.xy = a.zw * (float)h; return a + (float)(b * b); }
"""


def _is_recent_enough(command: tuple[str, ...]) -> bool:
    """Whether the compiler accepts the flags above, vector swizzles, `_Float16`, `__bf16`: clang of 2024 or later."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE)
        done = subprocess.run(
            [*command, *_KERNEL, *_CHECKED, *_hook_flags(), "-c", str(source), "-o", str(Path(folder, "probe.o"))],
            capture_output=True,
            check=False,
        )
    return done.returncode == 0


def _hook_flags() -> list[str]:
    return [part for key, value in _HOOKS.items() for part in ("-mllvm", f"-{key}={value}")]


def _file_stamp(path: str) -> str:
    status = os.stat(os.path.realpath(path))
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


@cache
def find_compiler() -> Clang:
    """Return the first recent enough of `$CXX` and the clang++ on the PATH, else the `ziglang` wheel.

    Raises:
        ToolchainMissing: there is no such compiler and no wheel.
    """
    candidates = [os.environ.get("CXX"), "clang++", *(f"clang++-{version}" for version in range(25, 17, -1))]
    for candidate in candidates:
        path = shutil.which(candidate) if candidate else None
        if path and _is_recent_enough((path,)):
            native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
            return Clang((path, native), (path, "-shared"), _file_stamp(path))
    package = importlib.util.find_spec("ziglang")
    if package is not None:
        zig = str(Path(next(iter(package.submodule_search_locations or [])), "zig"))  # `python -m ziglang` starts twice
        linker = (zig, "ld.lld", "-shared") if sys.platform == "linux" else (zig, "c++", "-shared")
        # `zig cc` defines none of the C++ library's macros.
        return Clang((zig, "cc", "-x", "c++"), linker, "ziglang " + importlib.metadata.version("ziglang"))
    raise ToolchainMissing("no clang 18 or later on the PATH: install one, or the wheel with `pip install ziglang`")


@cache
def mlx_headers() -> Path:
    """Return the folder of Metal headers inside the installed MLX, for the include path.

    Raises:
        ToolchainMissing: the installed MLX has no such folder.
    """
    spec = importlib.util.find_spec("mlx")
    for location in (spec.submodule_search_locations if spec else None) or []:
        if (found := Path(location) / "include").is_dir():
            return found
    raise ToolchainMissing("the installed mlx brings no Metal headers (mlx/include): install mlx 0.32 from its wheel")


def kernel_flags(build: Build) -> list[str]:
    """Return the flags that compile a kernel."""
    start = "-ftrivial-auto-var-init=" + ("zero" if build is Build.ZEROED else "pattern")
    how = [*_CHECKED, *_hook_flags()] if build is Build.CHECKED else _UNCHECKED
    return [*_KERNEL, start, *how, "-isystem", str(SHIM), "-isystem", str(mlx_headers())]


# Built libraries, and the cache.

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
            header = ["-Xclang", "-include-pch", "-Xclang", str(_precompile_preamble(tuple(flags)))]
            _run_compiler([*compiler.compile, *flags, *header, "-c", str(source), "-o", str(unit)])
            _run_compiler([*compiler.link, str(unit), str(_runtime_object()), "-o", str(library)])
            _store_in_cache(library, target)
    return target


@cache
def load(path: Path) -> ctypes.CDLL:
    """Return the built library, loaded into this process."""
    return ctypes.CDLL(str(path))


def cache_folder() -> Path:
    """Return the folder of built kernels: `$CORTEXMLX_SIM_CACHE`, or `sim` in the user's cache folder."""
    return Path(os.environ.get("CORTEXMLX_SIM_CACHE") or folders.cache_folder() / "sim")


def content_key(*parts: str) -> str:
    """Return a file name for the cache: a hash of `parts`, compiler, processor, MLX, simulator's shim and runtime."""
    compiler = find_compiler()
    everything = [compiler.identity, _processor_name(), _hash_own_files(), importlib.metadata.version("mlx"), *parts]
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
def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@cache
def _hash_own_files() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SHIM.rglob("*"), *RUNTIME.iterdir()]):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _precompile_preamble(flags: tuple[str, ...]) -> Path:
    """Precompile MLX's preamble and the shim headers for this process. They take half of the time of a small kernel.

    The input has the same path in every process, so zig finds the result in its own cache. The result has no
    timestamps: a new installation of the same headers changes only their times.
    """
    folder = tempfile.mkdtemp(prefix="metal-sim-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header, compiled = SHIM / "sim" / "preamble.h", Path(folder, "preamble.pch")
    once = ["-Xclang", "-fno-pch-timestamp", "-x", "c++-header"]
    _run_compiler([*find_compiler().compile, *flags, *once, str(header), "-o", str(compiled)])
    return compiled


def _runtime_object() -> Path:
    """Return the compiled runtime. Look for it at every call: another process that prunes the cache may delete it."""
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
            _run_compiler([*compiler.compile, *RUNTIME_FLAGS, "-c", str(unit), "-o", str(built)])
            _store_in_cache(built, target)
    return target


def _run_compiler(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        kept = [line for line in done.stderr.splitlines() if line.strip() and " generated." not in line]
        raise KernelCompileError("the kernel does not compile:\n" + "\n".join(kept[:40]))


def _store_in_cache(built: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(built, target)
    prune(target.parent)
