"""`python -m cortexmlx.metal.lab.agx [--build] [--all] [--json FILE] [words]`: what Mesa's compiler for Apple GPUs
says.

The compiler must be built once, in about ten minutes. See "What an Apple compiler makes of it" in metal/lab/README.md
for how far the table can be trusted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cortexmlx.errors import CortexError, ToolchainMissing
from cortexmlx.metal.lab.agx.compiler import COMMAND, CompilerOutput, MesaCompiler, build_compiler, find_compiler
from cortexmlx.metal.lab.agx.kernels import KernelWork, our_kernels, prefill_kernel, product_kernel
from cortexmlx.metal.lab.agx.listing import (
    CLASSES,
    Loop,
    Statistics,
    UnknownListing,
    find_loops,
    read_blocks,
    read_statistics,
)
from cortexmlx.metal.lab.cost.choice import candidates, shapes
from cortexmlx.metal.prefill import PREFILL_VARIANTS
from cortexmlx.metal.products.shape import PRODUCTS
from cortexmlx.metal.rules import VARIANTS
from cortexmlx.metal.shape import DTYPES


@dataclass(frozen=True)
class CompiledWork:
    """A compiled kernel."""

    workload: KernelWork
    statistics: Statistics
    per_token_head: dict[str, float] | None
    """Instructions that a simdgroup runs for one token and one query head, by class. They are those of the loops over
    keys and values, and a share of those that run once for a slice of tokens. Both sides of a branch count. None for a
    kernel without such loops.
    """
    tokens: tuple[float, ...]
    """Tokens that a turn of each loop does."""

    def record(self) -> dict[str, Any]:
        """Return the result in plain types, without the kernel's text."""
        kernel = asdict(self.workload)
        del kernel["source"]
        return {
            **kernel,
            **asdict(self.statistics),
            "tokens_per_turn": list(self.tokens),
            "per_token_head": self.per_token_head,
        }


def read_result(workload: KernelWork, output: CompilerOutput) -> CompiledWork:
    """Return what the compiler's output says of a kernel.

    Raises:
        UnknownListing: the output is not understood, or its loops do not load whole keys and values.
    """
    statistics = read_statistics(output.statistics)
    loops = find_loops(read_blocks(output.listing))
    if workload.heads is None:
        return CompiledWork(workload, statistics, None, ())
    parts = _token_loops(workload, loops)
    counts = dict.fromkeys(CLASSES, 0.0)
    for loop, tokens in parts:
        for kind, number in loop.kinds.items():
            counts[kind] += number / (tokens * workload.heads)
    rounded = {kind: round(number, 3) for kind, number in counts.items()}
    return CompiledWork(workload, statistics, rounded, tuple(tokens for _, tokens in parts))


def _token_loops(workload: KernelWork, loops: tuple[Loop, ...]) -> list[tuple[Loop, float]]:
    """Return the loops that all tokens pass through, each with the tokens of one turn. If a turn does a part of each of
    several tokens, their number is the sum of the parts.
    """
    assert workload.key_bytes is not None and workload.value_bytes is not None
    both = workload.key_bytes + workload.value_bytes
    largest = max(loops, key=lambda loop: loop.loaded)
    if workload.slice_tokens is None:
        return [(largest, _tokens(largest, both))]  # the unrolled loop, not its remainder
    for place, outer in enumerate(loops):
        inside = [inner for inner in loops[place + 1 : place + 1 + outer.inner] if inner.loaded]
        if len(inside) == 1 and outer.loaded >= workload.slice_tokens * workload.value_bytes:  # inside: keys only
            return [(inside[0], inside[0].loaded / workload.key_bytes), (outer, workload.slice_tokens)]
        if len(inside) == 1:
            return [(inside[0], _tokens(inside[0], both)), (outer, workload.slice_tokens)]
        if len(inside) in (2, 3):  # two loops over keys have half of the tokens each
            *keys, values = inside
            return [
                *((loop, _tokens(loop, workload.key_bytes) * len(keys)) for loop in keys),
                (values, _tokens(values, workload.value_bytes)),
                (outer, workload.slice_tokens),
            ]
        if inside:
            raise UnknownListing(f"{len(inside)} loops load, where keys and values are two")
    if largest.loaded < workload.slice_tokens * both:
        raise UnknownListing(
            f"no loop loads {workload.slice_tokens} tokens of {both} bytes, and none stands around two"
        )
    return [(largest, workload.slice_tokens)]


def _tokens(loop: Loop, needed: float) -> float:
    tokens, rest = divmod(loop.loaded, needed)
    if rest or not tokens:
        raise UnknownListing(f"a turn of a loop loads {loop.loaded} bytes, which is no multiple of a token's {needed}")
    return tokens


_COLUMNS = {
    "fma": ("fma",),
    "float": ("float",),
    "int": ("integer",),
    "shuffle": ("shuffle",),
    "reduce": ("reduce",),
    "matrix": ("matrix",),
    "load": ("device load",),
    "spill": ("spill",),
    "control": ("control",),
    "move": ("move",),
    "wait": ("wait",),
    "other": ("convert", "device store", "threadgroup"),
}


def heading() -> str:
    """Return the first line of the table: a kernel's columns, and after the bar those per token and query head."""
    kinds = "".join(f"{name:>8}" for name in _COLUMNS)
    return f"{'kernel':<72}{'inst':>5}{'regs':>5}{'threads':>8}{'spills':>7} |{'all':>6}{kinds}"


def row(result: CompiledWork) -> str:
    """Return a kernel's line of the table. `spills` are stores and loads of spilled registers in the whole kernel."""
    s, counts = result.statistics, result.per_token_head
    spills = f"{s.spills}:{s.fills}"
    label = f"{result.workload.kernel} {result.workload.name}"
    line = f"{label:<72}{s.instructions:>5}{s.half_registers:>5}{s.resident_threads:>8}{spills:>7} |"
    if counts is None:
        return line
    cells = "".join(f"{sum(counts[kind] for kind in kinds):>8.2f}" for kinds in _COLUMNS.values())
    return f"{line}{sum(counts.values()):>6.1f}{cells}"


# The command.


def main() -> int:
    """Print the table. Return 1 if the compiler is missing or refuses a kernel, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.lab.agx", description=__doc__)
    parser.add_argument("--build", action="store_true", help="build the compiler if it is not there, without asking")
    parser.add_argument("--all", action="store_true", help="the shapes of `python -m cortexmlx.metal.lab.cost`, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("words", nargs="*", help="only kernels whose line contains each of these")
    options = parser.parse_args()
    begun, results, refused = time.perf_counter(), [], []
    try:
        compiler = find_compiler() or _build_if_wanted(options.build)
    except CortexError as error:
        print(error, file=sys.stderr)
        return 1
    print(heading())
    for workload in _workloads(options.words, options.all):
        try:
            results.append(read_result(workload, compiler.compile(workload.source)))
            print(row(results[-1]), flush=True)
        except CortexError as error:
            refused.append(workload)
            print(f"{workload.kernel}, {workload.name}: {error}", file=sys.stderr)
    took = time.perf_counter() - begun
    print(f"Mesa {compiler.mesa}, LLVM {compiler.llvm}: {len(results)} kernels in {took:.0f} s", file=sys.stderr)
    if options.json is not None:
        record = {"mesa": compiler.mesa, "llvm": compiler.llvm, "kernels": [result.record() for result in results]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if refused else 0


def _build_if_wanted(agreed: bool) -> MesaCompiler:
    """Build the compiler if the user agrees, and return it."""
    if not agreed:
        if not sys.stdin.isatty():
            raise ToolchainMissing(
                f"Mesa's compiler for Apple GPUs is not built: `{COMMAND}` does it, in about ten minutes"
            )
        question = (
            "Build Mesa's compiler for Apple GPUs now (about ten minutes; installs Debian packages as root)? [y/N] "
        )
        if input(question).strip().lower() not in ("y", "yes"):
            raise ToolchainMissing("nothing was built")
    return build_compiler()


def _workloads(words: list[str], every: bool) -> Iterator[KernelWork]:
    """Yield the kernels with all `words` in their line, each text once, and with `every` those of `choice`'s shapes."""
    seen: set[str] = set()
    ours = (
        *VARIANTS,
        *(candidate for variant in (shapes(*DTYPES) if every else ()) for candidate in candidates(variant)),
    )
    others = (*map(prefill_kernel, PREFILL_VARIANTS), *map(product_kernel, PRODUCTS))
    for workload in (w for kernels in (*map(our_kernels, ours), others) for w in kernels):
        if workload.source not in seen and all(word in f"{workload.kernel} {workload.name}" for word in words):
            seen.add(workload.source)
            yield workload


if __name__ == "__main__":
    sys.exit(main())
