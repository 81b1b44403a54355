"""The simulator's C++ compiler and its flags."""

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

from cortexmlx.errors import ToolchainMissing

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
_COVERAGE = [
    "-O0",
    "-fwrapv",
    "-fsanitize-coverage=edge,inline-bool-flag,pc-table,control-flow,no-prune",
    "-include",
    "sim/counters.h",
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
    """The ways to compile a kernel. Uninitialised variables hold a pattern (NaN in floats); with ZEROED, they hold
    zeros.
    """

    CHECKED = "every access calls a hook"
    FAST = "nothing is watched"
    ZEROED = "as FAST, with zeros in such variables"
    COVERAGE = "nothing is watched or optimised, and every basic block leaves a mark"


@dataclass(frozen=True)
class Compiler:
    """A clang: the command that compiles, the command that links a shared library, and a text that identifies the
    compiler.
    """

    compile: tuple[str, ...]
    link: tuple[str, ...]
    identity: str


_PROBE = """
typedef float float4 __attribute__((ext_vector_type(4)));
float4 f(float4 a, _Float16 h, __bf16 b) { a.xy = a.zw * (float)h; return a + (float)(b * b); }
"""


def _is_recent_enough(command: tuple[str, ...]) -> bool:
    """Whether the compiler accepts the flags above, and vector swizzles, `_Float16` and `__bf16` in C++: clang of 2024
    or later.
    """
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
    """Return the first recent enough of `$CXX` and the clang++ on the PATH, else the `ziglang` wheel.

    Raises:
        ToolchainMissing: there is no such compiler and no wheel.
    """
    candidates = [os.environ.get("CXX"), "clang++", *(f"clang++-{version}" for version in range(25, 17, -1))]
    for candidate in candidates:
        path = shutil.which(candidate) if candidate else None
        if path and _is_recent_enough((path,)):
            return Compiler((path, *_native()), (path, "-shared"), _stamp(path))
    package = importlib.util.find_spec("ziglang")
    if package is not None:
        zig = str(Path(next(iter(package.submodule_search_locations or [])), "zig"))  # `python -m ziglang` starts twice
        linker = (zig, "ld.lld", "-shared") if sys.platform == "linux" else (zig, "c++", "-shared")
        # `zig cc` defines none of the C++ library's macros.
        return Compiler((zig, "cc", "-x", "c++"), linker, "ziglang " + importlib.metadata.version("ziglang"))
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


def _includes() -> list[str]:
    return ["-isystem", str(SHIM), "-isystem", str(mlx_headers())]


def kernel_flags(build: Build) -> list[str]:
    """Return the flags that compile a kernel."""
    start = "-ftrivial-auto-var-init=" + ("zero" if build is Build.ZEROED else "pattern")
    how = {Build.CHECKED: [*_CHECKED, *_hook_flags()], Build.COVERAGE: _COVERAGE}.get(build, _UNCHECKED)
    return [*_KERNEL, start, *how, *_includes()]
