"""MLX's own decode kernels in the simulator, on one query token over contiguous keys and values.

This module only counts what the kernels do, so their inputs are zeros. `judge` checks their results.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from cortexmlx.kv.spec import ITEMSIZE
from cortexmlx.metal.lab.judge.launches import METAL_NAMES, Array, contiguous, i32
from cortexmlx.metal.lab.sim.host import HostKernel, OutputBuffer, flatten
from cortexmlx.metal.lab.sim.kernel import numpy_type
from cortexmlx.metal.lab.sim.report import LaunchReport

_HEADERS = ("sdpa_vector.h",)
HELD = {64: 8, 128: 4}
"""Query heads that a simdgroup of `sdpa_vector_2pass_1_gqa` holds, by head_dim. MLX compiles that kernel for groups of
8 only.
"""

Buffer = Array | OutputBuffer


@dataclass(frozen=True)
class MlxShape:
    """One row of contiguous keys and values, and the query heads that attend to it."""

    dtype: str
    dim: int
    """The head_dim of keys and values."""
    group: int
    """Query heads that share a KV head."""
    tokens: int
    kv_heads: int = 1

    @property
    def live_bytes(self) -> int:
        """Bytes of all keys and values, each counted once."""
        return 2 * self.kv_heads * self.tokens * self.dim * ITEMSIZE[self.dtype]

    @property
    def inputs(self) -> list[Array]:
        """Queries `[query_heads, 1, dim]`, then keys and values `[kv_heads, tokens, dim]`, all zeros."""
        heads = ((self.kv_heads * self.group, 1), (self.kv_heads, self.tokens), (self.kv_heads, self.tokens))
        return [np.zeros((*of, self.dim), numpy_type(getattr(mx, self.dtype))) for of in heads]

    @property
    def name(self) -> str:
        """The name of the dtype in MLX's templates."""
        return METAL_NAMES[getattr(mx, self.dtype)]

    def output(self, rows: int) -> OutputBuffer:
        """Return an output buffer for `rows` results of `dim` numbers."""
        item = ITEMSIZE[self.dtype]
        return OutputBuffer(rows * self.dim * item, item)


def one_pass(shape: MlxShape) -> LaunchReport:
    """Run `sdpa_vector`: a threadgroup of 32 simdgroups for each query head. Each simdgroup takes every 32nd token."""
    kernel = HostKernel(_HEADERS, "sdpa_vector", f"{shape.name}, {shape.dim}", {})
    heads = shape.kv_heads * shape.group
    queries, keys, values = shape.inputs
    buffers: list[Buffer] = [queries, keys, values, shape.output(heads), i32(shape.group), *contiguous(keys, scale=1.0)]
    return kernel(dict(enumerate(buffers)), (heads, 1, 1), (1024, 1, 1)).report


def two_pass(shape: MlxShape, blocks: int) -> LaunchReport:
    """Run `sdpa_vector_2pass_1`: a simdgroup for each query head and block, which takes every `blocks`-th token."""
    kernel = HostKernel(_HEADERS, "sdpa_vector_2pass_1", f"{shape.name}, {shape.dim}", {"blocks": blocks})
    return _first_pass(kernel, shape, blocks)


def two_pass_gqa(shape: MlxShape, blocks: int, held: int) -> LaunchReport:
    """Run `sdpa_vector_2pass_1_gqa`: each simdgroup holds `held` query heads, and takes a run of a block's tokens."""
    numbers = f"{shape.name}, {shape.dim}, {shape.dim}, {shape.group}, {held}"
    return _first_pass(HostKernel(_HEADERS, "sdpa_vector_2pass_1_gqa", numbers, {}), shape, blocks)


def has_two_pass_gqa() -> bool:
    """Whether the installed MLX has `sdpa_vector_2pass_1_gqa` (MLX 0.32.4 and later)."""
    return "sdpa_vector_2pass_1_gqa" in flatten(_HEADERS)


def _first_pass(kernel: HostKernel, shape: MlxShape, blocks: int) -> LaunchReport:
    heads = shape.kv_heads * shape.group
    statistics = OutputBuffer(heads * blocks * 4, 4)
    queries, keys, values = shape.inputs
    buffers: list[Buffer] = [queries, keys, values, shape.output(heads * blocks), statistics, statistics]
    told = enumerate(contiguous(keys, scale=1.0), start=7)
    return kernel(dict(enumerate(buffers)) | dict(told), (shape.kv_heads, 1, blocks), (32, shape.group, 1)).report
