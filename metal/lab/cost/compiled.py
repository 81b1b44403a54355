"""The record of what a compiler for Apple GPUs made of the decode kernels, compiled.json.

`python -m cortexmlx.metal.lab.agx --all --json FILE` compiles the kernels. `python -m cortexmlx.metal.lab.cost --record
FILE` keeps instructions and registers, with a digest of each kernel's text. The record of another text is not used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError
from cortexmlx.metal.kernels import kernel_text
from cortexmlx.metal.rules import GEOMETRIES

RECORD_AGAIN = (
    "`python -m cortexmlx.metal.lab.agx --all --json FILE`, then `python -m cortexmlx.metal.lab.cost --record FILE`."
)


class UnusableRecord(CortexError):
    """A file is not a record of compiled kernels."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of the record."""

    kernel: str
    """The kernel's function, as in the compiler's table."""
    name: str
    """The variant, as in the compiler's table."""
    half_registers: int
    """Registers of 16 bits per thread, at most 256."""
    resident_threads: int
    """Threads that the register file of a GPU core holds, at most 1024."""
    spills: int
    """Stores and loads of spilled registers."""
    per_token_head: Mapping[str, float]
    """Instructions of one simdgroup for one token and one of its query heads, by the compiler's classes."""


@dataclass(frozen=True)
class CompilerRecord:
    """The compiled kernels, the compiler, and the digests of the texts."""

    compiler: str
    texts: Mapping[str, str]
    kernels: tuple[CompiledKernel, ...]

    def stale(self) -> list[str]:
        """Return the names of the texts that have changed since."""
        now = texts()
        return sorted(name for name, digest in self.texts.items() if now.get(name) != digest)

    def find(self, kernel: str, name: str) -> CompiledKernel | None:
        """Return the kernel, or None if it is not recorded or its text has changed since."""
        if f"{kernel}.metal" in self.stale():
            return None
        return next((k for k in self.kernels if (k.kernel, k.name) == (kernel, name)), None)

    def dump(self) -> str:
        """Return the text of the record's file: JSON, with a kernel on each line."""
        kernels = ",\n  ".join(json.dumps(asdict(kernel)) for kernel in self.kernels)
        head = json.dumps({"compiler": self.compiler, "texts": dict(self.texts)}, indent=1).removesuffix("\n}")
        return f'{head},\n "kernels": [\n  {kernels}\n ]\n}}\n'


@cache
def texts() -> dict[str, str]:
    """Return the digests of the compiled texts."""
    named = {f"{g.name}.metal": g.entry + (g.quantized_entry or "") + kernel_text(g.file) for g in GEOMETRIES.values()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in named.items()}


def make_record(result: Any) -> CompilerRecord:
    """Return the record of a result of `python -m cortexmlx.metal.lab.agx --json`, with the digests of the texts
    as they are now. Kernels without loops over tokens are left out.

    Raises:
        UnusableRecord: it is something else.
    """
    try:
        return CompilerRecord(
            f"Mesa {result['mesa']}, LLVM {result['llvm']}",
            texts(),
            tuple(
                CompiledKernel(
                    k["kernel"],
                    k["name"],
                    k["half_registers"],
                    k["resident_threads"],
                    k["spills"] + k["fills"],
                    {kind: number for kind, number in k["per_token_head"].items() if number},
                )
                for k in result["kernels"]
                if k["per_token_head"] is not None
            ),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UnusableRecord(f"this is no result of python -m cortexmlx.metal.lab.agx --json: {error!r}") from error


def read_record(text: str) -> CompilerRecord:
    """Return the record in a text that `dump` wrote.

    Raises:
        UnusableRecord: the text is something else.
    """
    try:
        kept = json.loads(text)
        return CompilerRecord(kept["compiler"], kept["texts"], tuple(CompiledKernel(**k) for k in kept["kernels"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableRecord(f"compiled.json is no record of compiled kernels: {error!r}") from error


@cache
def packaged_record() -> CompilerRecord:
    """Return the record that comes with the package."""
    return read_record((files("cortexmlx.metal.lab.cost") / "compiled.json").read_text())


def write_record(source: Path, target: Path) -> CompilerRecord:
    """Make the record of a compiler's result, write it to `target` and return it."""
    record = make_record(json.loads(source.read_text()))
    target.write_text(record.dump())
    return record
