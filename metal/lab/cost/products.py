"""A model of the quantized products of a decode step: `python -m cortexmlx.metal.lab.cost.products` prints the table.

A step takes at least as long as memory takes for the weights, and as the schedulers take for the instructions. Of
these, products are `least`; all that a compiler for the M1 makes is `most`. MLX takes a kernel for a few vectors up
to a limit of rows, and products of tiles of 32 rows above. Attention and everything else of a step are not in it.

`python -m cortexmlx.metal.lab.agx.products FILE` writes the instructions, which products.json keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from cortexmlx.metal.lab.agx.products import text_digest
from cortexmlx.metal.lab.compare.mlx_decode import Buffer
from cortexmlx.metal.lab.sim.host import HostKernel, Output
from cortexmlx.metal.products.shape import TILE, ProductShape, split

LAYER = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
LAYERS, HEAD = 32, (4096, 128256)
"""The matrices of an 8B model, (inputs, outputs): Llama 3.1's."""

VECTOR_ROWS = 9
"""The most rows for which MLX takes `qmv_wide` on an M3 or M4 at these sizes (mlx#3863, M3 Max)."""

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
class Chip:
    """A GPU: its cores, its highest clock in GHz, and its published memory bandwidth in GB/s (10^9 bytes)."""

    cores: int
    clock: float
    bandwidth: float

    @property
    def scheduler_cycles(self) -> float:
        """Cycles of all schedulers together, in 10^9 per second."""
        return self.cores * SCHEDULERS * self.clock


CHIPS = {"M3 Max": Chip(40, 1.380, 400.0), "M4 Max": Chip(40, 1.578, 546.0), "M4": Chip(10, 1.578, 120.0)}
"""Cores and bandwidth as Apple publishes them, clocks as published logs of powermetrics show them."""


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
class Spent:
    """What a kernel spends on a weight, for all rows of a product."""

    reads: float
    """How many times it reads the weight from memory, if no cache has it."""
    least: Work
    """Products of matrices, or of numbers."""
    most: Work


@dataclass(frozen=True)
class Measured:
    """Milliseconds of MLX's product of 5,120 inputs and 17,408 outputs, 4 bits, on an M3 Max (mlx#3863)."""

    rows: int
    milliseconds: float


MEASURED = (Measured(1, 0.128), Measured(4, 0.165), Measured(8, 0.323), Measured(16, 0.509), Measured(32, 0.513))
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
        4: Output(rows * outputs * 2, 2),
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


def ours(rows: int) -> Spent:
    """Return what our product spends."""
    parts = split(rows)
    work = _compiled()["quantized_product", TILE * parts.tiles]
    return _times(parts.parts, parts.parts, {"matrix": work["matrix"]}, work)


def mlx(rows: int) -> Spent:
    """Return what the kernel spends that MLX takes on an M3 or M4."""
    if rows == 1:
        work = _compiled()["qmv_fast", 1]
        return _times(1, 1, {"fma": 1 / 32}, work)
    if rows > VECTOR_ROWS:
        tiles, work = -(-rows // 32), matrix_work()
        return _times(tiles, tiles, {"matrix": work["matrix"]}, work)
    tiles = -(-rows // WIDE_ROWS)
    held = -(-rows // tiles)
    return _times(tiles, tiles, {"fma": held / 32}, _compiled()["qmv_wide", held])


def _times(times: int, reads: float, least: Work, most: Work) -> Spent:
    return Spent(reads, *({kind: times * number for kind, number in work.items()} for work in (least, most)))


def step(chip: Chip, shapes: tuple[ProductShape, ...], spent: Spent) -> Milliseconds:
    """Return the time of the products of some shapes. The shorter time reads each weight once from memory, and spends
    the least; the longer one reads it as often as the kernel does.
    """
    numbers = sum(shape.inputs * shape.outputs for shape in shapes)
    memory = sum(shape.weight_bytes for shape in shapes) / chip.bandwidth / 1e6
    computing = [numbers * cycles(work) / chip.scheduler_cycles / 1e6 for work in (spent.least, spent.most)]
    return Milliseconds(max(memory, computing[0]), max(spent.reads * memory, computing[1]))


def table() -> Iterator[str]:
    """Yield the table, line by line."""
    yield "products of a step of an 8B model in 4 bits, ms: a model"
    if stale():
        yield "our product's text has changed since it was compiled: python -m cortexmlx.metal.lab.agx.products FILE"
    yield f"{'rows':>4}" + "".join(f"{name + ', ours':>20}{'MLX':>16}" for name in ("M3 Max", "M4 Max", "M4"))
    for rows in (1, 4, 8, 9, 16, 24, 32):
        times = (
            f"{step(CHIPS[name], model_8b(), ours(rows))!s:>20}{step(CHIPS[name], model_8b(), mlx(rows))!s:>16}"
            for name in ("M3 Max", "M4 Max", "M4")
        )
        yield f"{rows:>4}" + "".join(times)
    yield ""
    yield "MLX's product of 5,120 to 17,408 on an M3 Max, ms: measured (mlx#3863), modelled; ours, modelled"
    for measured in MEASURED:
        theirs, mine = (_one(kind(measured.rows)) for kind in (mlx, ours))
        yield f"{measured.rows:>4}{measured.milliseconds:>10.3f}{theirs:>16}{mine:>16}"


def _one(spent: Spent) -> str:
    time = step(CHIPS["M3 Max"], (MEASURED_SHAPE,), spent)
    return f"{time.least:.2f} - {time.most:.2f}"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
