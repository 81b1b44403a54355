"""The same arithmetic as a compiler for Apple GPUs makes it: moves, addresses and masks of active lanes included.

`python -m cortexmlx.metal.agx --all --json FILE` compiles the kernels; `python -m cortexmlx.metal.cost --record FILE`
keeps what the sheet needs of it in compiled.json, with a digest of each kernel's text. A record of another text is not
used, and the sheet says so.
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
"""The compiler's classes of arithmetic, and what an instruction of each costs at least."""

_COUNTED_ELSEWHERE = ("shuffle", "reduce", "matrix", "device load", "device store", "threadgroup")

SELECTIONS = 3
"""Of a shuffle by a lane that it does not know the compiler makes four, one for each lane of a quad, and so many
selections among them: they are in the published cycles of such a shuffle, so they are not counted again. (What it takes
to make the four indices is, at most 8 instructions.)"""


class UnusableRecord(CortexError):
    """A file that is no record of compiled kernels."""


@dataclass(frozen=True)
class CompiledKernel:
    """Instructions for one token and one query head, by the compiler's classes. `kernel` and `name` are those of its
    table: a kernel's function, and the variant or the dtype and head_dim. A core holds `threads` threads of it, and it
    has `spills` stores and loads of spilled registers.
    """

    kernel: str
    name: str
    threads: int
    spills: int
    per_token_head: Mapping[str, float]


@dataclass(frozen=True)
class Record:
    """What was compiled, by which compiler, and the digests of the texts."""

    compiler: str
    texts: Mapping[str, str]
    kernels: tuple[CompiledKernel, ...]

    def stale(self) -> list[str]:
        """The texts that have changed since."""
        now = texts()
        return sorted(name for name, digest in self.texts.items() if now.get(name) != digest)

    def find(self, kernel: str, name: str) -> CompiledKernel | None:
        """The kernel, if it is here and its text is still the same."""
        if _text_of(kernel) in self.stale():
            return None
        return next((k for k in self.kernels if (k.kernel, k.name) == (kernel, name)), None)

    def dump(self) -> str:
        """As it is kept: JSON, a kernel in each line."""
        kernels = ",\n  ".join(json.dumps(asdict(kernel)) for kernel in self.kernels)
        head = json.dumps({"compiler": self.compiler, "texts": dict(self.texts)}, indent=1).removesuffix("\n}")
        return f'{head},\n "kernels": [\n  {kernels}\n ]\n}}\n'


def work(compiled: CompiledKernel, heads: int, exponents: float, shuffles: float) -> dict[Kind, float]:
    """The arithmetic for one token and `heads` query heads of a KV head. `exponents` of the compiler's floats are
    exponentials; `shuffles` shuffles are by a lane known at run time.
    """
    counts = dict.fromkeys(_KINDS.values(), 0.0)
    for name, kind in _KINDS.items():
        counts[kind] += heads * compiled.per_token_head[name]
    counts[Kind.ARITHMETIC] -= exponents + SELECTIONS * shuffles
    return {**{kind: count for kind, count in counts.items() if count}, Kind.EXPONENT: exponents}


def texts() -> dict[str, str]:
    """Digests of the texts that are compiled: ours, and MLX's header as installed."""
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
    """The record of a result of `python -m cortexmlx.metal.agx --json`, made from the texts as they are now.

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
    """A record as `dump` wrote it."""
    try:
        kept = json.loads(text)
        return Record(kept["compiler"], kept["texts"], tuple(CompiledKernel(**k) for k in kept["kernels"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableRecord(f"compiled.json is no record of compiled kernels: {error!r}") from error


@cache
def kept_record() -> Record:
    """The record that comes with the package."""
    return read_record((files("cortexmlx.metal.cost") / "compiled.json").read_text())


def keep(source: Path, target: Path) -> Record:
    """Make the record of a compiler's result and write it to `target`."""
    record = make_record(json.loads(source.read_text()))
    target.write_text(record.dump())
    return record
