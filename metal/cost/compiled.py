"""The same arithmetic in a compiler's output for Apple GPUs: moves, addresses and masks of active lanes included.

`python -m cortexmlx.metal.agx --all --json FILE` compiles the kernels. `python -m cortexmlx.metal.cost --record FILE`
keeps what the sheet needs in compiled.json, with a digest of each kernel's text. The sheet does not use the record of
another text, and says so.
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
from cortexmlx.metal.cost.cycles import Kind
from cortexmlx.metal.kernels import kernel_text
from cortexmlx.metal.legal.msl import KERNEL_FOLDER
from cortexmlx.metal.matrix import MatrixGeometry
from cortexmlx.metal.sim.toolchain import mlx_headers
from cortexmlx.metal.vector import VectorGeometry
from cortexmlx.metal.wide import WideGeometry

OURS = "paged_decode"
MATRIX = "paged_matrix"
WIDE = "paged_wide"
RECORD_AGAIN = "`python -m cortexmlx.metal.agx --all --json FILE`, then `python -m cortexmlx.metal.cost --record FILE`."
_KINDS = {
    "fma": Kind.ARITHMETIC,
    "float": Kind.ARITHMETIC,
    "integer": Kind.ARITHMETIC,
    "convert": Kind.CONVERT,
    "move": Kind.MOVE,
    "control": Kind.CONTROL,
    "wait": Kind.CONTROL,
    "spill": Kind.LOAD,
}
"""The compiler's classes of arithmetic, each with the kind of instruction that gives its least cost."""

_COUNTED_ELSEWHERE = ("shuffle", "reduce", "matrix", "device load", "device store", "threadgroup")

SELECTIONS = 3
"""Selections in a shuffle by a lane that the compiler does not know. The compiler makes four shuffles, one for each
lane of a quad, and selects from their results. The published cycles of such a shuffle contain the selections, so they
are not counted twice. The instructions for the four indices, at most 8, are counted twice.
"""


class UnusableRecord(CortexError):
    """A file is not a record of compiled kernels."""


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of the record."""

    kernel: str
    """The kernel's function, as in the compiler's table."""
    name: str
    """The variant, or the dtype and head_dim, as in the compiler's table."""
    threads: int
    """Threads that a GPU core holds."""
    spills: int
    """Stores and loads of spilled registers."""
    per_token_head: Mapping[str, float]
    """Instructions for one token and one query head, by the compiler's classes."""


@dataclass(frozen=True)
class Record:
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
        if _text_of(kernel) in self.stale():
            return None
        return next((k for k in self.kernels if (k.kernel, k.name) == (kernel, name)), None)

    def dump(self) -> str:
        """Return the text of the record's file: JSON, with a kernel on each line."""
        kernels = ",\n  ".join(json.dumps(asdict(kernel)) for kernel in self.kernels)
        head = json.dumps({"compiler": self.compiler, "texts": dict(self.texts)}, indent=1).removesuffix("\n}")
        return f'{head},\n "kernels": [\n  {kernels}\n ]\n}}\n'


def work(compiled: CompiledKernel, heads: int, exponents: float, shuffles: float) -> dict[Kind, float]:
    """Return the arithmetic for one token and `heads` query heads of a KV head. `exponents` of the compiler's floats
    are exponentials. `shuffles` is the number of shuffles by a lane known at run time.
    """
    counts = dict.fromkeys(_KINDS.values(), 0.0)
    for name, kind in _KINDS.items():
        counts[kind] += heads * compiled.per_token_head[name]
    counts[Kind.ARITHMETIC] -= exponents + SELECTIONS * shuffles
    return {**{kind: count for kind, count in counts.items() if count}, Kind.EXPONENT: exponents}


def texts() -> dict[str, str]:
    """Return the digests of the compiled texts: ours, and MLX's header as installed."""
    ours, matrix, wide = (
        g.entry + (g.quantized_entry or "") + kernel_text(g.file)
        for g in (VectorGeometry, MatrixGeometry, WideGeometry)
    )
    theirs = (mlx_headers() / KERNEL_FOLDER / "sdpa_vector.h").read_text()
    all_ours = ((_text_of(OURS), ours), (_text_of(MATRIX), matrix), (_text_of(WIDE), wide))
    named = (*all_ours, (_text_of("sdpa_vector"), theirs))
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in named}


def _text_of(kernel: str) -> str:
    return f"{kernel}.metal" if kernel in (OURS, MATRIX, WIDE) else "MLX's sdpa_vector.h"


def make_record(result: Any) -> Record:
    """Return the record of a result of `python -m cortexmlx.metal.agx --json`, with the digests of the texts as they
    are now.

    Raises:
        UnusableRecord: it is something else, or has a class of instructions that the sheet has no price for.
    """
    try:
        kernels = [k for k in result["kernels"] if k["per_token_head"] is not None]
        for kernel in kernels:
            if unknown := set(kernel["per_token_head"]) - {*_KINDS, *_COUNTED_ELSEWHERE}:
                raise UnusableRecord(
                    f"{kernel['kernel']} has instructions of unknown kinds: {', '.join(sorted(unknown))}"
                )
        return Record(
            f"Mesa {result['mesa']}, LLVM {result['llvm']}",
            texts(),
            tuple(
                CompiledKernel(
                    k["kernel"],
                    k["name"],
                    k["resident_threads"],
                    k["spills"] + k["fills"],
                    {n: k["per_token_head"][n] for n in _KINDS},
                )
                for k in kernels
            ),
        )
    except (KeyError, TypeError) as error:
        raise UnusableRecord(f"this is no result of python -m cortexmlx.metal.agx --json: {error!r}") from error


def read_record(text: str) -> Record:
    """Return the record in a text that `dump` wrote.

    Raises:
        UnusableRecord: the text is something else.
    """
    try:
        kept = json.loads(text)
        return Record(kept["compiler"], kept["texts"], tuple(CompiledKernel(**k) for k in kept["kernels"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableRecord(f"compiled.json is no record of compiled kernels: {error!r}") from error


@cache
def kept_record() -> Record:
    """Return the record that comes with the package."""
    return read_record((files("cortexmlx.metal.cost") / "compiled.json").read_text())


def keep(source: Path, target: Path) -> Record:
    """Make the record of a compiler's result, write it to `target` and return it."""
    record = make_record(json.loads(source.read_text()))
    target.write_text(record.dump())
    return record
