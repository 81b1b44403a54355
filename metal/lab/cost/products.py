"""A model of the quantized products of a decode step: `python -m cortexmlx.metal.lab.cost.products` prints the table.

A step takes at least as long as memory takes for the weights, and as the schedulers take for the instructions. Of
these, products are `least`; all that a compiler for the M1 makes is `most`. MLX takes a kernel for a few vectors up
to a limit of rows, and products of tiles of 32 rows above. Attention and everything else of a step are not in it.

`python -m cortexmlx.metal.lab.cost.products --record FILE` writes the instructions, which products.json keeps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from cortexmlx.metal.lab.agx.compiler import COMMAND, CompilerOutput, find_compiler
from cortexmlx.metal.lab.agx.kernel_files import kernel_texts
from cortexmlx.metal.lab.agx.listing import CLASSES, UnknownListing, find_loops, read_blocks, read_statistics
from cortexmlx.metal.lab.agx.opencl import Instance, opencl_unit
from cortexmlx.metal.lab.cost.mlx_attention import Buffer
from cortexmlx.metal.lab.sim.host import HostKernel, OutputBuffer, flatten
from cortexmlx.metal.products.shape import OUTPUTS, TILE, ProductShape, ProductVariant, split_rows
from cortexmlx.products.autotuning import mlx_row_limit

LAYER = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
LAYERS, HEAD = 32, (4096, 128256)
"""The matrices of an 8B model, (inputs, outputs): Llama 3.1's."""

VECTOR_ROWS = 12
"""The most rows for which MLX takes `qmv_wide` on an M3 or M4; 14 if the larger dimension is 2,049 to 4,096
(`get_qmv_batch_limit`).
"""

WIDE_ROWS = 5
"""The most rows that `qmv_wide` multiplies at a time. It reads the weights once for each such tile."""

Work = Mapping[str, float]
"""The instructions for a weight, by the compiler's classes."""

ISSUE = {"convert": 2.0, "shuffle": 2.04, "matrix": 20.87}
"""The cycles for which an instruction of a simdgroup keeps its scheduler, as measured on an M1
(philipturner/metal-benchmarks). All others take one; of loads, stores, barriers and branches that is an assumption.
"""

CONVERT_CYCLES = 4.0
"""The cycles for which a conversion keeps the second pipeline, which runs in parallel (the same source)."""

SCHEDULERS = 4
"""Schedulers of a core (the same source)."""


@dataclass(frozen=True)
class AppleGpu:
    """A GPU: its cores, its highest clock in GHz, and its published memory bandwidth in GB/s (10^9 bytes)."""

    cores: int
    clock: float
    bandwidth: float
    architecture: tuple[int, str]
    """As `gpu_architecture` returns it: it decides which kernel MLX takes."""

    @property
    def scheduler_cycles(self) -> float:
        """Cycles of all schedulers together, in 10^9 per second."""
        return self.cores * SCHEDULERS * self.clock


CHIPS = {
    "M1": AppleGpu(8, 1.278, 68.25, (13, "g")),
    "M3 Max": AppleGpu(40, 1.380, 400.0, (15, "s")),
    "M4 Max": AppleGpu(40, 1.578, 546.0, (16, "s")),
    "M4": AppleGpu(10, 1.578, 120.0, (16, "g")),
    "M5": AppleGpu(10, 1.578, 153.6, (17, "g")),
}
"""Cores and bandwidth as Apple publishes them, clocks as logs of powermetrics show them; of an M5 an M4's."""


def cycles(work: Work) -> float:
    """Return the cycles of one scheduler when enough simdgroups are ready to hide every latency."""
    issued = sum(ISSUE.get(kind, 1.0) * count for kind, count in work.items())
    return max(issued, CONVERT_CYCLES * work.get("convert", 0.0))


@dataclass(frozen=True)
class Milliseconds:
    """A range of a time."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:.1f} - {self.most:.1f}"


@dataclass(frozen=True)
class WeightCost:
    """What a kernel spends on a weight, for all rows of a product."""

    reads: float
    """How many times it reads the weight from memory, if no cache has it."""
    least: Work
    """Products of matrices, or of numbers."""
    most: Work


@dataclass(frozen=True)
class MeasuredTime:
    """Milliseconds of MLX's product of 5,120 inputs and 17,408 outputs, 4 bits, on an M3 Max (mlx#3863)."""

    rows: int
    milliseconds: float


MEASURED = (
    MeasuredTime(1, 0.128),
    MeasuredTime(4, 0.165),
    MeasuredTime(8, 0.323),
    MeasuredTime(16, 0.509),
    MeasuredTime(32, 0.513),
)
MEASURED_SHAPE = ProductShape("bfloat16", "affine", 4, 64, 5120, 17408)


def model_8b() -> tuple[ProductShape, ...]:
    """Return the products of a step of an 8B model in 4 bits, groups of 64."""
    return tuple(ProductShape("float16", "affine", 4, 64, *dims) for dims in (*LAYER * LAYERS, HEAD))


@cache
def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads((files("cortexmlx.metal.lab.cost") / "products.json").read_text())
    return record


def stale() -> bool:
    """Return whether the text of our product has changed since it was compiled."""
    return bool(_record()["text"] != text_digest())


@cache
def _compiled() -> dict[tuple[str, int], Work]:
    """Return the instructions for a weight of each kernel in products.json."""
    found: dict[tuple[str, int], Work] = {}
    for kernel in _record()["kernels"]:
        found[kernel["kernel"], kernel["rows"]] = kernel["per_weight"]
    return found


@cache
def matrix_work() -> Work:
    """Return what MLX's `affine_qmm_t` does for a weight and 32 rows, counted in the simulator: no arithmetic."""
    rows, inputs, outputs = 32, 128, 32
    kernel = HostKernel(
        ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"), "affine_qmm_t", "half, 64, 4, true, false", {}
    )
    buffers: dict[int, Buffer] = {
        0: np.zeros((outputs, inputs // 8), np.uint32),
        1: np.zeros((outputs, inputs // 64), np.uint16),
        2: np.zeros((outputs, inputs // 64), np.uint16),
        3: np.zeros((rows, inputs), np.uint16),
        4: OutputBuffer(rows * outputs * 2, 2),
        **{index: np.array([size], np.int32) for index, size in ((5, inputs), (6, outputs), (7, rows))},
        **{index: np.zeros(8, np.int64) for index in range(8, 16)},
    }
    report = kernel({slot: buffers[slot] for slot in kernel.slots}, (1, 1, 1), (32, 2, 2)).report
    weights = inputs * outputs
    simdgroups = report.threads // 32
    return {
        "matrix": report.simd_instructions["matrix_multiply"] / weights,
        "threadgroup": (report.threadgroup_bytes_read + report.threadgroup_bytes_written) / (32 * 4) / weights,
        "barrier": report.barriers * simdgroups / weights,
    }


def ours(rows: int) -> WeightCost:
    """Return what our product spends."""
    parts = split_rows(rows)
    work = _compiled()["quantized_product", TILE * parts.tiles]
    return _times(parts.parts, parts.parts, {"matrix": work["matrix"]}, work)


def mlx(rows: int, vector_rows: int = VECTOR_ROWS, generation: int = 16) -> WeightCost:
    """Return what the kernel spends that MLX takes, with up to `vector_rows` rows one for vectors: by default on an M3
    or M4.
    """
    if rows > vector_rows:
        if generation >= 17:  # matrix units: as fast as memory
            return WeightCost(1, {}, {})
        tiles, work = -(-rows // 32), matrix_work()
        return _times(tiles, tiles, {"matrix": work["matrix"]}, work)
    if rows == 1 or generation < 15:
        return _times(rows, rows, {"fma": 1 / 32}, _compiled()["qmv_fast", 1])
    tiles = -(-rows // WIDE_ROWS)
    held = -(-rows // tiles)
    return _times(tiles, tiles, {"fma": held / 32}, _compiled()["qmv_wide", held])


def _times(times: int, reads: float, least: Work, most: Work) -> WeightCost:
    return WeightCost(reads, *({kind: times * number for kind, number in work.items()} for work in (least, most)))


def step(chip: AppleGpu, shapes: tuple[ProductShape, ...], spent: WeightCost) -> Milliseconds:
    """Return the time of the products of some shapes. The shorter time reads each weight once from memory, and spends
    the least; the longer one reads it as often as the kernel does.
    """
    numbers = sum(shape.inputs * shape.outputs for shape in shapes)
    memory = sum(shape.weight_bytes for shape in shapes) / chip.bandwidth / 1e6
    computing = [numbers * cycles(work) / chip.scheduler_cycles / 1e6 for work in (spent.least, spent.most)]
    return Milliseconds(max(memory, computing[0]), max(spent.reads * memory, computing[1]))


@dataclass(frozen=True)
class DecodeModel:
    """A model in 4 bits: the (inputs, outputs) of a layer's matrices, and those of an expert, if it has any."""

    layers: int
    matrices: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    kv_bytes: int
    """Of a token, in all layers."""
    experts: int = 0
    chosen: int = 0
    """Experts that a token takes."""
    expert: tuple[tuple[int, int], ...] = ()


MODELS = {
    "Qwen3-8B-4bit": DecodeModel(
        36,
        ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 12288), (4096, 12288), (12288, 4096)),
        (4096, 151936),
        36 * 2 * 8 * 128 * 2,
    ),
    "Qwen3-30B-A3B-4bit": DecodeModel(
        48,
        ((2048, 4096), (2048, 512), (2048, 512), (4096, 2048), (2048, 128)),
        (2048, 151936),
        48 * 2 * 4 * 128 * 2,
        128,
        8,
        ((2048, 768), (2048, 768), (768, 2048)),
    ),
}


def decode_step(model: DecodeModel, chip: AppleGpu, rows: int, tokens: int, *, by_mlx: bool) -> Milliseconds:
    """Return the time of a step's products and of reading its rows' keys and values, `tokens` each.

    Rows choose experts at random. MLX reads an expert's weights for each row that chose it; in the shorter time, a
    cache has them the second time. Norms, rotations and launches are not in it.
    """
    total = [model.kv_bytes * rows * tokens / chip.bandwidth / 1e6] * 2
    for dims in (*model.matrices * model.layers, model.head):
        shape = ProductShape("float16", "affine", 4, 64, *dims)
        limit = mlx_row_limit(shape, chip.architecture)
        assert limit is not None
        time = step(chip, (shape,), mlx(rows, limit - 1, chip.architecture[0]) if by_mlx else ours(rows))
        total = [total[0] + time.least, total[1] + time.most]
    if model.experts:
        pairs = rows * model.chosen
        read = model.experts * (1 - (1 - model.chosen / model.experts) ** rows)
        shapes = tuple(ProductShape("float16", "affine", 4, 64, *dims) for dims in model.expert)
        one = step(chip, shapes, mlx(1) if by_mlx else ours(1))
        total = [
            total[0] + model.layers * read * one.least,
            total[1] + model.layers * (pairs if by_mlx else read) * one.most,
        ]
    return Milliseconds(*total)


def model_table() -> Iterator[str]:
    """Yield the steps of the models by our product and by MLX's, line by line."""
    for name, model in MODELS.items():
        yield f"{name}, ms of a decode step: a model"
        yield f"{'rows':>4}{'tokens':>8}" + "".join(f"{c + ', ours':>20}{'MLX':>16}" for c in ("M1", "M4 Max", "M5"))
        for rows in (1, 8, 16):
            for tokens in (2048, 16384):
                times = (
                    decode_step(model, CHIPS[chip], rows, tokens, by_mlx=by_mlx)
                    for chip in ("M1", "M4 Max", "M5")
                    for by_mlx in (False, True)
                )
                yield f"{rows:>4}{tokens:>8,}" + "".join(
                    f"{time!s:>{20 - 4 * (i % 2)}}" for i, time in enumerate(times)
                )
        yield ""


def table() -> Iterator[str]:
    """Yield the table, line by line."""
    yield "products of a step of an 8B model in 4 bits, ms: a model"
    if stale():
        yield "our product's text has changed since it was compiled: run this command with --record FILE"
    yield f"{'rows':>4}" + "".join(f"{name + ', ours':>20}{'MLX':>16}" for name in ("M3 Max", "M4 Max", "M4"))
    for rows in (1, 4, 8, 12, 16, 24, 32):
        times = (
            f"{step(CHIPS[name], model_8b(), ours(rows))!s:>20}{step(CHIPS[name], model_8b(), mlx(rows))!s:>16}"
            for name in ("M3 Max", "M4 Max", "M4")
        )
        yield f"{rows:>4}" + "".join(times)
    yield ""
    yield "MLX's product of 5,120 to 17,408 on an M3 Max, ms: measured (mlx#3863), modelled; ours, modelled"
    for measured in MEASURED:
        of_mlx, of_ours = (_milliseconds(kind(measured.rows)) for kind in (mlx, ours))
        yield f"{measured.rows:>4}{measured.milliseconds:>10.3f}{of_mlx:>16}{of_ours:>16}"


def _milliseconds(spent: WeightCost) -> str:
    time = step(CHIPS["M3 Max"], (MEASURED_SHAPE,), spent)
    return f"{time.least:.2f} - {time.most:.2f}"


# The instructions for a quantized weight, in our product and in MLX's. MLX multiplies a few rows by `qmv`, which
# dequantizes each weight for each row, or on newer chips by `qmv_wide`, which does so for each 5 rows, and more rows by
# `qmm`, in tiles of 32. The headers that `qmm` is built from are beyond this dialect of Metal: see `matrix_work`.

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
        [text] = kernel_texts(ProductVariant(SHAPE, rows))
        unit = opencl_unit(text.text, Instance(text.name, text.template, (SHAPE.threads, 1, 1)))
        yield ProductWork("quantized_product", 8 * split_rows(rows).tiles, OUTPUTS * SHAPE.group, unit)
    yield ProductWork(
        "qmv_fast", 1, 4 * 16 * 32, _mlx_unit("qmv_fast_impl", _VECTOR_CALL)
    )  # 4 outputs, 16 inputs a lane
    for rows in (2, 3, 4, 5):
        yield ProductWork(
            "qmv_wide", rows, 8 * 32, _mlx_unit("qmv_wide_impl", _WIDE_CALL.format(rows))
        )  # 8 inputs a lane


def _mlx_unit(function: str, call: str) -> str:
    """Return a kernel around a function of MLX's header. Numbers are passed by value, as a GPU keeps them."""
    text = flatten(("quantized.h",))
    helpers = text[: text.rindex("template <", 0, text.index("struct QuantizedBlockLoader"))]
    at = text.index(f"METAL_FUNC void {function}(")
    chosen = text[text.rindex("template <", 0, at) : text.index("\n}\n", at) + 3]
    whole = "#define METAL_FUNC inline\n" + re.sub(r"const constant int&", "const int", helpers + chosen)
    whole += f"\ntemplate <typename T>\n[[kernel]] void product({_ARGUMENTS}) {{ {call} }}\n"
    return opencl_unit(whole, Instance("product", {"T": "float16_t"}, (32, 2, 1)))


def read_count(work: ProductWork, output: CompilerOutput) -> ProductCount:
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
    [text] = kernel_texts(ProductVariant(SHAPE, 16))
    return hashlib.sha256(text.text.encode()).hexdigest()


def record(target: Path) -> int:
    """Compile the kernels, write the counts to `target`, print a line for each kernel, and return the exit status."""
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
    result = {"compiler": f"Mesa {compiler.mesa}, LLVM {compiler.llvm}", "text": text_digest(), "kernels": counts}
    target.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or record the instructions. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.lab.cost.products", description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="compile the kernels and write their instructions")
    parser.add_argument("--models", action="store_true", help="steps of two models on an M1, an M4 Max and an M5")
    options = parser.parse_args(arguments)
    if options.record is not None:
        return record(options.record)
    for line in model_table() if options.models else table():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
