"""The cost of prefill per square: 8 queries of a head by 8 keys that they see, in our kernel and in MLX's.

Every kernel needs (key_dim + value_dim) / 8 products of matrices for a square. The rest is loss. The simulator counts
products, loads, traffic of threadgroup memory and barriers. The arithmetic of the softmax is counted in the texts.
Addresses are not counted. An unfused attention is modelled, not run: it computes the products of all squares, seen or
not, and every score goes to memory and back, as `UNFUSED_BYTES` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from cortexmlx.kv.attention_window import AttentionWindow
from cortexmlx.kv.blocks.allocator import KVHandle
from cortexmlx.kv.spec import ITEMSIZE
from cortexmlx.kv.step import PrefillPiece
from cortexmlx.metal import sim
from cortexmlx.metal.chips import CHIPS
from cortexmlx.metal.compare.mlx_prefill import key_rows, steel_attention
from cortexmlx.metal.cost.counts import Counted, count
from cortexmlx.metal.cost.cycles import Kind, Work, cycles, together
from cortexmlx.metal.prefill import FUSED, PrefillInputs, PrefillKernel, PrefillVariant
from cortexmlx.metal.work import SMALL, prefill_list

FIRST, END = 384, 512
"""The queries are these tokens of a row."""
UNFUSED_BYTES = 13
"""Bytes that move for a score of 2 bytes: the product writes it, it is read and written with a mask's byte, the softmax
reads and writes it, the second product reads it.
"""


@dataclass(frozen=True)
class PrefillCost:
    """What a kernel spends on a square."""

    kernel: str
    squares: float
    """The squares that its queries see."""
    counted: Counted
    text: Work
    """The arithmetic of the softmax."""

    @property
    def work(self) -> dict[Kind, float]:
        """All instructions that are counted."""
        return together(self.counted.work, self.text)


def squares(heads: int, window: int | None = None) -> float:
    """Return the number of squares that the queries of `heads` heads see."""
    token = np.arange(FIRST, END)
    return heads * float(np.minimum(token + 1, window or END).sum()) / 64


@cache
def ours(variant: PrefillVariant, window: int | None = None) -> PrefillCost:
    """Return the cost of the prefill kernel for one KV head."""
    dtype, kv_dtype = getattr(mx, variant.dtype), getattr(mx, variant.kv_dtype)
    blocks = -(-END // variant.block_size)
    work = prefill_list(
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
    number = squares(variant.group, window)
    row_bytes = (variant.key_dim + variant.value_dim) * ITEMSIZE[variant.kv_dtype] / 2
    counted = count(recorded.last, ("keys", "values"), number, row_bytes)
    return PrefillCost("paged_prefill", number, counted, softmax(variant.value_dim, variant.slice))


@cache
def steel(dtype: str, dim: int, group: int, window: int | None = None) -> PrefillCost:
    """Return the cost of MLX's fused attention for one KV head. With a window it runs with a mask, on the keys from the
    first that the first query sees.
    """
    begin = 0 if window is None else max(0, FIRST + 1 - window)
    with sim.recording():
        report = steel_attention(dtype, dim, group, FIRST - begin, END - begin, masked=window is not None)
    number = squares(group, window)
    counted = count(report, ("buffer(1)", "buffer(2)"), number, dim * ITEMSIZE[dtype])
    return PrefillCost("steel_attention", number, counted, softmax(dim, key_rows(dim)))


def softmax(value_dim: int, slice_tokens: int) -> Work:
    """Return the arithmetic of the softmax for a square. Each lane has two scores: each is scaled, compared,
    subtracted, raised and summed. Once per slice the factor is raised and the output rescaled: two numbers of each of
    its matrices.
    """
    slices = 8 / slice_tokens
    return {
        Kind.ARITHMETIC: 2 * (1 + 1 + 2 + 1) + slices * 2 * (2 + value_dim / 8),
        Kind.EXPONENT: 2 * (1 + slices),
    }


def table() -> Iterator[str]:
    """Yield the table, line by line."""
    yield "per square of 8 queries by 8 keys that they see  products  loads  group bytes  barriers  cycles  of products"
    for window in (None, 128):
        for dim in (64, 128, 256):
            variant = PrefillVariant("float16", "float16", dim, dim, 32, 4)
            costs = [ours(variant, window)]
            if dim in FUSED:
                costs.append(steel("float16", dim, 4, window))
            yield f"float16, head_dim {dim}, 4 per KV head, tokens {FIRST} .. {END}" + (
                f", window {window}" if window else ""
            )
            yield from (_line(cost, 2 * dim / 8) for cost in costs)
            if dim not in FUSED:
                yield _unfused(dim, window)


def _line(cost: PrefillCost, needed: float) -> str:
    work = cost.work
    spent = cycles(work)
    return (
        f"  {cost.kernel:<48}{work[Kind.MATRIX_HALF]:>8.1f}{work[Kind.LOAD]:>7.2f}"
        f"{cost.counted.threadgroup_bytes:>13.0f}{work[Kind.BARRIER]:>10.2f}{spent:>8.0f}"
        f"{needed * Kind.MATRIX_HALF.issue / spent:>13.2f}"
    )


def _unfused(dim: int, window: int | None) -> str:
    """Return the line of an attention without a kernel of its own: dense products, and the cycles that its scores take
    in memory.
    """
    seen = END if window is None else min(END, END - FIRST + window - 1)
    dense = (END - FIRST) * seen / 64 / squares(1, window)
    chip = CHIPS["M2 Max"]
    products = dense * 2 * dim / 8
    memory = chip.budget(dense * 64 * UNFUSED_BYTES)
    spent = products * Kind.MATRIX_HALF.issue + memory
    return (
        f"  {'unfused, by products and scores (M2 Max)':<48}{products:>8.1f}{'':>30}{spent:>8.0f}"
        f"{2 * dim / 8 * Kind.MATRIX_HALF.issue / spent:>13.2f}"
    )


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
