"""Instructions for a quantized weight, in our product and in MLX's:
`python -m cortexmlx.metal.lab.agx.products FILE.json`.

MLX multiplies a few rows by `qmv`, which dequantizes each weight for each row, or on newer chips by `qmv_wide`, which
does so for each 5 rows, and more rows by `qmm`, in tiles of 32. The headers that `qmm` is built from are beyond this
dialect of Metal. What it multiplies is counted in the simulator (`cost/products.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cortexmlx.metal.lab.agx.compiler import COMMAND, Output, find_compiler
from cortexmlx.metal.lab.agx.kernel_files import kernel_texts
from cortexmlx.metal.lab.agx.listing import CLASSES, UnknownListing, find_loops, read_blocks, read_statistics
from cortexmlx.metal.lab.agx.opencl import Instance, opencl_unit
from cortexmlx.metal.lab.sim.host import flatten
from cortexmlx.metal.products.shape import OUTPUTS, Product, ProductShape, split

SHAPE = ProductShape("float16", "affine", 4, 64, 4096, 4096)
"""What is compared: 4 bits in groups of 64, in halves."""

_ARGUMENTS = """
    const device uint32_t* w [[buffer(0)]], const device T* scales [[buffer(1)]], const device T* biases [[buffer(2)]],
    const device T* x [[buffer(3)]], device T* y [[buffer(4)]], const constant int& inputs [[buffer(5)]],
    const constant int& outputs [[buffer(6)]], const constant int& rows [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]"""
_VECTOR_CALL = "qmv_fast_impl<T, 64, 4>(w, scales, biases, x, y, inputs, outputs, group, simdgroup, lane);"
_WIDE_CALL = "qmv_wide_impl<T, 64, 4, {0}, 8>(w, scales, biases, x, y, inputs, outputs, rows, group, simdgroup, lane);"


@dataclass(frozen=True)
class ProductWork:
    """A kernel that multiplies `rows` rows at a time, and what one turn of its innermost loop does."""

    kernel: str
    rows: int
    weights: int
    """Weights that a simdgroup multiplies in a turn of the loop that loads most."""
    source: str


@dataclass(frozen=True)
class ProductCount:
    """What a compiler makes of it."""

    kernel: str
    rows: int
    half_registers: int
    resident_threads: int
    spills: int
    per_weight: dict[str, float]
    """Instructions of a simdgroup for a weight and all rows that are multiplied at a time, by class."""


def workloads() -> Iterator[ProductWork]:
    """Yield our product with one, two and three tiles of rows, and MLX's kernels for few rows."""
    for rows in (8, 16, 24):
        [text] = kernel_texts(Product(SHAPE, rows))
        unit = opencl_unit(text.text, Instance(text.name, text.template, (SHAPE.threads, 1, 1)))
        yield ProductWork("quantized_product", 8 * split(rows).tiles, OUTPUTS * SHAPE.group, unit)
    yield ProductWork("qmv_fast", 1, 4 * 16 * 32, _of_mlx("qmv_fast_impl", _VECTOR_CALL))  # 4 outputs, 16 inputs a lane
    for rows in (2, 3, 4, 5):
        yield ProductWork(
            "qmv_wide", rows, 8 * 32, _of_mlx("qmv_wide_impl", _WIDE_CALL.format(rows))
        )  # 8 inputs a lane


def _of_mlx(function: str, call: str) -> str:
    """Return a kernel around a function of MLX's header. Numbers are passed by value, as a GPU keeps them."""
    text = flatten(("quantized.h",))
    helpers = text[: text.rindex("template <", 0, text.index("struct QuantizedBlockLoader"))]
    at = text.index(f"METAL_FUNC void {function}(")
    chosen = text[text.rindex("template <", 0, at) : text.index("\n}\n", at) + 3]
    whole = "#define METAL_FUNC inline\n" + re.sub(r"const constant int&", "const int", helpers + chosen)
    whole += f"\ntemplate <typename T>\n[[kernel]] void product({_ARGUMENTS}) {{ {call} }}\n"
    return opencl_unit(whole, Instance("product", {"T": "float16_t"}, (32, 2, 1)))


def read_count(work: ProductWork, output: Output) -> ProductCount:
    """Return what the compiler's output says.

    Raises:
        UnknownListing: no loop loads anything.
    """
    statistics, loops = read_statistics(output.statistics), find_loops(read_blocks(output.listing))
    turn = max(loops, key=lambda loop: loop.loaded, default=None)
    if turn is None or not turn.loaded:
        raise UnknownListing(f"{work.kernel} has no loop that loads")
    return ProductCount(
        work.kernel,
        work.rows,
        statistics.half_registers,
        statistics.resident_threads,
        statistics.spills + statistics.fills,
        {kind: turn.kinds[kind] / work.weights for kind in CLASSES if turn.kinds[kind]},
    )


def text_digest() -> str:
    """Return a digest of the text of our product, as MLX would compile it."""
    [text] = kernel_texts(Product(SHAPE, 16))
    return hashlib.sha256(text.text.encode()).hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Write the counts to the given file, and print a line for each kernel."""
    if len(arguments) != 1:
        print("usage: python -m cortexmlx.metal.lab.agx.products FILE.json", file=sys.stderr)
        return 2
    compiler = find_compiler()
    if compiler is None:
        print(f"Mesa's compiler for Apple GPUs is not built: `{COMMAND}` builds it", file=sys.stderr)
        return 1
    counts = []
    for work in workloads():
        count = read_count(work, compiler.compile(work.source))
        counts.append(asdict(count))
        matrix = count.per_weight.get("matrix", 0.0)
        print(
            f"{count.kernel:<18}{count.rows:>3} rows  registers {count.half_registers:>3}  threads "
            f"{count.resident_threads:>4}  spills {count.spills}  instructions for a weight "
            f"{sum(count.per_weight.values()):.3f}, of them products of matrices {matrix:.3f}",
            flush=True,
        )
    record = {"compiler": f"Mesa {compiler.mesa}, LLVM {compiler.llvm}", "text": text_digest(), "kernels": counts}
    Path(arguments[0]).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
