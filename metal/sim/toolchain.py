"""The C++ compiler behind the simulator, and a cache of what it built, addressed by content."""

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
from functools import cache
from pathlib import Path

from cortexmlx.errors import KernelCompileError, ToolchainMissing

HERE = Path(__file__).parent
SHIM = HERE / "shim"
RUNTIME = HERE / "runtime"
MAX_CACHED = 4000

_COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-stack-protector",
    "-fstack-clash-protection",
    "-ffp-contract=off",
    "-fno-sanitize=all",
]
_KERNEL = [
    *_COMMON,
    "-nostdinc",
    "-fdeclspec",
    "-gdwarf-4",
    "-g1",
    "-w",
    "-ftrivial-auto-var-init=pattern",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-Xclang",
    "-fconvergent-functions",
]
_UNCHECKED = ["-O2", "-fwrapv", "-fmax-type-align=1"]
_CHECKED = [
    "-O1",
    "-fsanitize=alignment,signed-integer-overflow,integer-divide-by-zero,bounds",
    "-fno-sanitize-trap=all",
    "-Xclang",
    "-fsanitize=kernel-address",
]
_HOOKS = {
    "asan-instrumentation-with-call-threshold": 0,
    "asan-stack": 0,
    "asan-globals": 0,
    "asan-opt-same-temp": 0,
    "asan-kernel-mem-intrinsic-prefix": 1,
    "disable-loop-idiom-all": 1,
    "inline-threshold": 100000,
}


@dataclass(frozen=True)
class Compiler:
    """A clang: the command for compiling, the command for linking a shared library, and what identifies it."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    identity: str


_PROBE = """
typedef float float4 __attribute__((ext_vector_type(4)));
float4 f(float4 a, _Float16 h, __bf16 b) { a.xy = a.zw * (float)h; return a + (float)(b * b); }
"""


def _is_recent_enough(command: tuple[str, ...]) -> bool:
    """Vector swizzles, `_Float16` and `__bf16` in C++, and the flags above: a clang of 2024 or later."""
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


def _native() -> list[str]:
    return ["-march=native"] if platform.machine() in ("x86_64", "AMD64") else ["-mcpu=native"]


def _stamp(path: str) -> str:
    status = os.stat(os.path.realpath(path))
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


@cache
def find_compiler() -> Compiler:
    """`$CXX` or a clang++ on the PATH if recent enough, else the `ziglang` wheel.

    Raises:
        ToolchainMissing: none of them is there.
    """
    candidates = [os.environ.get("CXX"), "clang++", *(f"clang++-{version}" for version in range(25, 17, -1))]
    for candidate in candidates:
        path = shutil.which(candidate) if candidate else None
        if path and _is_recent_enough((path,)):
            return Compiler((path, *_native()), (path, "-shared"), _stamp(path))
    if importlib.util.find_spec("ziglang") is not None:
        zig = (sys.executable, "-m", "ziglang")
        linker = (*zig, "ld.lld", "-shared") if sys.platform == "linux" else (*zig, "c++", "-shared")
        return Compiler((*zig, "c++"), linker, "ziglang " + importlib.metadata.version("ziglang"))
    raise ToolchainMissing("no clang 18 or later on the PATH: install one, or the wheel with `pip install ziglang`")


def cache_folder() -> Path:
    """Where built kernels are kept: `$CORTEXMLX_SIM_CACHE`, or the user's cache folder."""
    if override := os.environ.get("CORTEXMLX_SIM_CACHE"):
        return Path(override)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cortexmlx" / "sim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cortexmlx" / "sim"


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@cache
def mlx_headers() -> Path:
    """The folder of Metal headers inside the installed MLX, to be put on the include path."""
    spec = importlib.util.find_spec("mlx")
    for location in (spec.submodule_search_locations if spec else None) or []:
        if (found := Path(location) / "include").is_dir():
            return found
    raise ToolchainMissing("the installed mlx brings no Metal headers (mlx/include): install mlx 0.32 from its wheel")


@cache
def _own_files() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SHIM.rglob("*"), *RUNTIME.iterdir()]):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def content_key(*parts: str) -> str:
    """A name for what these parts, this compiler, this processor and the simulator's own files give."""
    compiler = find_compiler()
    everything = [compiler.identity, _processor(), _own_files(), importlib.metadata.version("mlx"), *parts]
    return hashlib.sha256("\0".join(everything).encode()).hexdigest()[:32]


def _execute(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelCompileError(_readable(done.stderr, text))


def _readable(diagnostics: str, text: str) -> str:
    """The first errors of the compiler's output, each with the line of kernel text it is about."""
    kept = [line for line in diagnostics.splitlines() if line.strip() and " generated." not in line]
    return "the kernel does not compile:\n" + "\n".join(kept[:40])


def _store(built: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(built, target)
    prune(target.parent)


def prune(folder: Path, most: int = MAX_CACHED) -> None:
    """When the cache holds more than `most` files, the quarter that has not been used for longest goes."""
    files = [path for path in folder.iterdir() if path.is_file()]
    if len(files) > most:
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[: len(files) - most * 3 // 4]:
            path.unlink(missing_ok=True)


@cache
def _runtime_object() -> Path:
    compiler = find_compiler()
    sources = sorted(RUNTIME.glob("*.cpp"))
    target = cache_folder() / f"runtime-{content_key('runtime')}.o"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unit = Path(folder, "runtime.cpp")
            unit.write_text("".join(f'#include "{source}"\n' for source in sources))
            built = Path(folder, "runtime.o")
            _execute([*compiler.compile, *_COMMON, "-O2", "-g0", "-c", str(unit), "-o", str(built)])
            _store(built, target)
    return target


def _includes() -> list[str]:
    return ["-isystem", str(SHIM), "-isystem", str(mlx_headers())]


def syntax_command() -> list[str]:
    """The command that checks a file without compiling it; every error is reported."""
    # With -c, or ziglang first builds a C++ standard library to link with.
    quiet = [flag for flag in _KERNEL if flag != "-w"]
    strict = ["-c", "-fsyntax-only", "-ferror-limit=0", "-Wno-everything", "-Wvla", "-Werror=vla"]
    return [*find_compiler().compile, *quiet, *_includes(), *strict]


def build(text: str, checked: bool) -> Path:
    """Compile C++ `text` (rewritten kernel and entry point) with the runtime into a shared library; cached.

    Raises:
        KernelCompileError: the compiler refused it; the message has its first diagnostics.
        ToolchainMissing: no usable compiler.
    """
    compiler = find_compiler()
    flags = [*_KERNEL, *(_CHECKED if checked else _UNCHECKED), *(_hook_flags() if checked else [])]
    flags += _includes()
    target = cache_folder() / f"{content_key(text, *flags)}.so"
    if target.exists():
        os.utime(target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            source, unit, library = (Path(folder, name) for name in ("kernel.cpp", "kernel.o", "kernel.so"))
            source.write_text(text)
            _execute([*compiler.compile, *flags, "-c", str(source), "-o", str(unit)], text)
            _execute([*compiler.link, str(unit), str(_runtime_object()), "-o", str(library)])
            _store(library, target)
    return target


@cache
def load(path: Path) -> ctypes.CDLL:
    """The built library in this process."""
    return ctypes.CDLL(str(path))
