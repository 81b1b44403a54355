"""The cost of prefill per square: 8 queries of a head by 8 keys that they see, in our kernel and in MLX's.

Every kernel needs (key_dim + value_dim) / 8 products of matrices for a square. The rest is loss. The simulator counts
products, loads, bytes of threadgroup memory and barriers. An unfused attention is not run: it computes the products of
all squares, seen or not, and writes every score to memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from cortexmlx.kv.allocator import KVHandle
from cortexmlx.kv.spec import ITEMSIZE, AttentionWindow
from cortexmlx.kv.step import PrefillPiece
from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.cost.mlx_attention import MlxShape, steel
from cortexmlx.metal.lab.sim.report import LaunchReport
from cortexmlx.metal.prefill import FUSED, PrefillInputs, PrefillKernel, PrefillVariant
from cortexmlx.metal.work import SMALL, make_prefill_work_list

FIRST, END = 384, 512
"""The queries are these tokens of a row."""
LANE_BYTES = 16
"""The most bytes that a lane loads with one instruction: four numbers of 32 bits."""
_UNIFORM_BYTES = 8
"""A buffer of at most this size is a single number, which a GPU reads once for all simdgroups."""


@dataclass(frozen=True)
class PrefillCost:
    """What a kernel does for a square, as instructions of a simdgroup."""

    kernel: str
    products: float
    """Products of 8 x 8 matrices."""
    loads: float
    """Loads and stores of device memory."""
    group_bytes: float
    """Bytes of threadgroup memory that are read and written."""
    barriers: float


def count(kernel: str, report: LaunchReport, slabs: Iterable[str], seen: float, row_bytes: float) -> PrefillCost:
    """Return the counts of a launch whose queries see `seen` squares.

    Args:
        report: the launch.
        slabs: the names of the buffers that hold keys and values.
        row_bytes: bytes of a token's key or value: the mean of the two.
    """
    names = set(slabs)
    # Every GPU compiler merges neighbouring loads of a lane. The simulator's compiler may leave them separate.
    row_loads = sum(report.buffers[name].bytes_read for name in names) / min(row_bytes, 32 * LANE_BYTES)
    others = [b for b in report.buffers.values() if b.name not in names and b.bytes > _UNIFORM_BYTES]
    simdgroups = report.threads / report.threadgroups / 32
    return PrefillCost(
        kernel,
        report.simd_instructions["matrix_multiply"] / seen,
        (row_loads + sum(b.simd_accesses for b in others)) / seen,
        (report.threadgroup_bytes_read + report.threadgroup_bytes_written) / seen,
        (report.barriers * simdgroups + report.simdgroup_barriers) / seen,
    )


def squares(heads: int, window: int | None = None) -> float:
    """Return the number of squares that the queries of `heads` heads see."""
    token = np.arange(FIRST, END)
    return heads * float(np.minimum(token + 1, window or END).sum()) / 64


@cache
def ours(variant: PrefillVariant, window: int | None = None) -> PrefillCost:
    """Return the cost of the prefill kernel for one KV head."""
    dtype, kv_dtype = getattr(mx, variant.dtype), getattr(mx, variant.kv_dtype)
    blocks = -(-END // variant.block_size)
    work = make_prefill_work_list(
        [PrefillPiece(0, END - FIRST, FIRST, KVHandle(0, blocks), None)],
        variant.block_size,
        AttentionWindow(window),
        variant.tile,
    )
    inputs = PrefillInputs(
        mx.ones((END - FIRST, variant.group, 1, variant.key_dim), dtype),
        mx.ones((1, blocks * variant.block_size, variant.key_dim), kv_dtype),
        mx.ones((1, blocks * variant.block_size, variant.value_dim), kv_dtype),
        mx.array(work.tables),
        mx.array(work.plan),
        mx.array([1.0, 0.0]),
        mx.zeros(max(SMALL, variant.group)),
    )
    with sim.recording() as recorded:
        PrefillKernel(sim.metal_kernel)(variant, work.items, inputs)
    row_bytes = (variant.key_dim + variant.value_dim) * ITEMSIZE[variant.kv_dtype] / 2
    return count("paged_prefill", recorded.last, ("keys", "values"), squares(variant.group, window), row_bytes)


@cache
def fused(dtype: str, dim: int, group: int, window: int | None = None) -> PrefillCost:
    """Return the cost of MLX's fused attention for a KV head; with a window, masked, from the first key seen on."""
    begin = 0 if window is None else max(0, FIRST + 1 - window)
    with sim.recording():
        report = steel(MlxShape(dtype, dim, group, END - begin), FIRST - begin, masked=window is not None)
    slabs = ("buffer(1)", "buffer(2)")
    return count("steel_attention", report, slabs, squares(group, window), dim * ITEMSIZE[dtype])


def table() -> Iterator[str]:
    """Yield the table, line by line."""
    yield f"{'per square of 8 queries by 8 keys that they see':<50}products  needed  loads  group bytes  barriers"
    for window in (None, 128):
        for dim in (64, 128, 256):
            variant = PrefillVariant("float16", "float16", dim, dim, 32, 4)
            of_window = f", window {window}" if window else ""
            yield f"float16, head_dim {dim}, 4 per KV head, tokens {FIRST} .. {END}{of_window}"
            costs = [ours(variant, window)]
            if dim in FUSED:
                costs.append(fused("float16", dim, 4, window))
            for cost in costs:
                yield (
                    f"  {cost.kernel:<48}{cost.products:>8.1f}{2 * dim / 8:>8.0f}{cost.loads:>7.2f}"
                    f"{cost.group_bytes:>13.0f}{cost.barriers:>10.2f}"
                )
            if dim not in FUSED:
                yield f"  {'unfused: products of all squares':<48}{unfused(dim, window):>8.1f}{2 * dim / 8:>8.0f}"


def unfused(dim: int, window: int | None = None) -> float:
    """Return the products per square of attention without its own kernel: queries by all keys from the first seen."""
    keys = END if window is None else min(END, END - FIRST + window - 1)
    return (END - FIRST) * keys / 64 / squares(1, window) * 2 * dim / 8


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
