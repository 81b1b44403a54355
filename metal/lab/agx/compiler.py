"""Mesa's compiler for Apple GPUs on this machine: where it is, how it is built, and what it says of a kernel."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from cortexmlx.errors import KernelCompileError, ToolchainMissing
from cortexmlx.system import files as folders

COMMAND = "python -m cortexmlx.metal.lab.agx --build"
_TIMEOUT = 300.0
_LANGUAGE = [
    *("-cl-std=clc++2021", "-Xclang", "-finclude-default-header", "-Wno-c++11-narrowing"),
    *("-O0", "-ffp-contract=on", "-fno-discard-value-names"),
]
_CXX_VERSION = re.compile(r"^!opencl\.cxx\.version = .*$", re.M)
_WARNING = re.compile(r"^SPIR-V WARNING:\n(?:[ \t].*\n)*", re.M)


@dataclass(frozen=True)
class CompilerOutput:
    """What the compiler printed for one kernel: its instructions, and the line of statistics."""

    listing: str
    statistics: str


@dataclass(frozen=True)
class MesaCompiler:
    """A built compiler."""

    folder: Path
    mesa: str
    llvm: int
    """The version of clang and of the SPIR-V translator, which run before Mesa."""

    def compile(self, unit: str) -> CompilerOutput:
        """Compile a translation unit in C++ for OpenCL that holds one kernel.

        Raises:
            KernelCompileError: clang, the translator or Mesa refuses it. The message names the tool and quotes it.
        """
        with tempfile.TemporaryDirectory() as place:
            source, text, module, words = (Path(place, f"kernel.{suffix}") for suffix in ("clcpp", "ll", "bc", "spv"))
            source.write_text(unit)
            self._run("clang", [*self._clang("cl"), *_LANGUAGE, "-S", str(source), "-o", str(text)])
            # The translator knows what OpenCL's functions are, but not that C++ for OpenCL has the same ones.
            text.write_text(_CXX_VERSION.sub("", text.read_text()))
            self._run("clang", [*self._clang("ir"), "-c", str(text), "-o", str(module)])
            self._run("llvm-spirv", [*self._translator(), str(module), "-o", str(words)])
            output, statistics = self._run(
                "asahi_clc",
                [str(self.folder / "asahi_clc"), str(words), os.devnull, os.devnull],
                AGX_MESA_DEBUG="shaders,shaderdb,internal",
                MESA_SHADER_CACHE_DISABLE="true",
            )
        return CompilerOutput(output, statistics)

    def _clang(self, language: str) -> list[str]:
        """Return clang's command. It does not optimise: that is Mesa's work, and would hide the arguments' names."""
        typed = ["-Xclang", "-no-opaque-pointers"] if self.llvm == 15 else []
        target = ["-target", "spir64-unknown-unknown", "-x", language]
        return [f"clang-{self.llvm}", *target, "-Xclang", "-disable-llvm-passes", *typed, "-emit-llvm", "-w"]

    def _translator(self) -> list[str]:
        extensions = "--spirv-ext=+SPV_INTEL_subgroups,+SPV_KHR_linkonce_odr"
        return [f"llvm-spirv-{self.llvm}", "--spirv-fp-contract=fast", extensions]

    def _run(self, name: str, command: list[str], **environment: str) -> tuple[str, str]:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
                env={**os.environ, **environment},
            )
        except FileNotFoundError as error:
            raise ToolchainMissing(f"{command[0]} is not there: build again with `{COMMAND}`") from error
        except subprocess.TimeoutExpired as error:
            raise KernelCompileError(f"{name} had not ended after {_TIMEOUT:.0f} seconds") from error
        if done.returncode != 0:
            said = _WARNING.sub("", done.stderr).strip().splitlines()
            raise KernelCompileError(f"{name} failed ({done.returncode}):\n" + "\n".join(said[:20]))
        return done.stdout, done.stderr


def cache_folder() -> Path:
    """Return the compiler's folder, in `$CORTEXMLX_AGX_CACHE` or the user's cache: one per build script and edits."""
    digest = hashlib.sha256()
    for name in ("build.sh", "edits.py"):
        digest.update((files("cortexmlx.metal.lab.agx") / name).read_bytes())
    base = os.environ.get("CORTEXMLX_AGX_CACHE")
    return Path(folders.cache_folder() / "agx" if base is None else base) / digest.hexdigest()[:12]


def find_compiler() -> MesaCompiler | None:
    """Return the compiler, or None if it is not built."""
    folder = cache_folder()
    try:
        lines = (folder / "versions").read_text().split()
    except OSError:
        return None
    versions = dict(line.split("=", 1) for line in lines)
    return MesaCompiler(folder, versions["mesa"], int(versions["llvm"]))


def build_compiler() -> MesaCompiler:
    """Build the compiler. The script's output goes to stderr.

    Raises:
        ToolchainMissing: it cannot be built here.
    """
    with as_file(files("cortexmlx.metal.lab.agx")) as here:
        done = subprocess.run(["bash", str(here / "build.sh"), str(cache_folder())], stdout=sys.stderr, check=False)
    found = find_compiler()
    if done.returncode != 0 or found is None:
        raise ToolchainMissing(f"Mesa's compiler was not built (build.sh ended with {done.returncode}): see above")
    return found
