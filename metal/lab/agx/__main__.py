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
from pathlib import Path

from cortexmlx.errors import CortexError, ToolchainMissing
from cortexmlx.metal.lab.agx.compiler import COMMAND, Compiler, build_compiler, find_compiler
from cortexmlx.metal.lab.agx.kernels import Workload, mlx_kernels, our_kernels, prefill_kernel, product_kernel
from cortexmlx.metal.lab.agx.report import heading, read_result, row
from cortexmlx.metal.lab.cost.choice import candidates, shapes
from cortexmlx.metal.lab.cost.sheet import SHAPES
from cortexmlx.metal.prefill import PREFILL_VARIANTS
from cortexmlx.metal.products.shape import PRODUCTS
from cortexmlx.metal.rules import VARIANTS
from cortexmlx.metal.shape import DTYPES


def main() -> int:
    """Print the table. Return 1 if the compiler is missing or refuses a kernel, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.lab.agx", description=__doc__)
    parser.add_argument("--build", action="store_true", help="build the compiler if it is not there, without asking")
    parser.add_argument(
        "--all", action="store_true", help="the shapes of `python -m cortexmlx.metal.lab.cost --choice`, too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("words", nargs="*", help="only kernels whose line contains each of these")
    options = parser.parse_args()
    begun, results, refused = time.perf_counter(), [], []
    try:
        compiler = find_compiler() or _built(options.build)
    except CortexError as error:
        print(error, file=sys.stderr)
        return 1
    print(heading())
    for workload in _chosen(options.words, options.all):
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


def _built(agreed: bool) -> Compiler:
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


def _chosen(words: list[str], every: bool) -> Iterator[Workload]:
    """Yield the kernels with all `words` in their line, each text once. They include the kernels of the cost sheet's
    shapes.
    """
    seen: set[str] = set()
    compared = (*SHAPES, *(shapes(*DTYPES) if every else ()))
    ours = (*VARIANTS, *(candidate for variant in compared for candidate in candidates(variant)))
    others = (*map(prefill_kernel, PREFILL_VARIANTS), *map(product_kernel, PRODUCTS))
    for workload in (w for kernels in (*map(our_kernels, ours), others, mlx_kernels()) for w in kernels):
        if workload.source not in seen and all(word in f"{workload.kernel} {workload.name}" for word in words):
            seen.add(workload.source)
            yield workload


if __name__ == "__main__":
    sys.exit(main())
