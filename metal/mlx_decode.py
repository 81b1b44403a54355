"""MLX's own decode attention kernels in the simulator, on one query token over contiguous keys and values.

What they do is counted here, so the numbers that they read are zeros; that they are right is shown by `sim/judge`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cortexmlx.metal.sim.host import HostKernel, Output, flatten
from cortexmlx.metal.sim.report import LaunchReport

_HEADERS = ("sdpa_vector.h",)
_NAMES = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
_BITS: dict[str, np.dtype[Any]] = {
    name: np.dtype(bits) for name, bits in (("float32", "uint32"), ("float16", "uint16"), ("bfloat16", "uint16"))
}

HELD = {64: 8, 128: 4}
"""Query heads that a simdgroup of `sdpa_vector_2pass_1_gqa` holds by head_dim: MLX compiles it for groups of 8 only."""

_SCALE = np.array([1.0], np.float32)

Buffer = npt.NDArray[Any] | Output


@dataclass(frozen=True)
class Shape:
    """One row of `tokens` tokens: `group` query heads for each of `kv_heads` KV heads, head_dim `dim` for both."""

    dtype: str
    dim: int
    group: int
    tokens: int
    kv_heads: int = 1

    @property
    def live_bytes(self) -> int:
        """Bytes of all keys and values, each once."""
        return 2 * self.kv_heads * self.tokens * self.dim * _BITS[self.dtype].itemsize

    @property
    def inputs(self) -> list[Buffer]:
        """Queries, keys, values."""
        heads = ((self.kv_heads * self.group, 1), (self.kv_heads, self.tokens), (self.kv_heads, self.tokens))
        return [np.zeros((*of, self.dim), _BITS[self.dtype]) for of in heads]

    @property
    def strides(self) -> list[Buffer]:
        """Of keys, then of values: from head to head, and from token to token."""
        return [np.array([stride], np.uint64) for stride in (self.tokens * self.dim, self.dim) * 2]

    def output(self, rows: int) -> Output:
        """Room for a result of each row."""
        item = _BITS[self.dtype].itemsize
        return Output(rows * self.dim * item, item)


def one_pass(shape: Shape) -> LaunchReport:
    """`sdpa_vector`: a threadgroup of 32 simdgroups for each query head, each simdgroup with every 32nd token."""
    kernel = HostKernel(_HEADERS, "sdpa_vector", f"{_NAMES[shape.dtype]}, {shape.dim}", {})
    heads = shape.kv_heads * shape.group
    buffers = [*shape.inputs, shape.output(heads), _int(shape.group), _int(shape.tokens), *shape.strides, _SCALE]
    return kernel(dict(enumerate(buffers)), (heads, 1, 1), (1024, 1, 1)).report


def two_pass(shape: Shape, blocks: int) -> LaunchReport:
    """`sdpa_vector_2pass_1`: a simdgroup for each query head and block, with every `blocks`-th token."""
    kernel = HostKernel(_HEADERS, "sdpa_vector_2pass_1", f"{_NAMES[shape.dtype]}, {shape.dim}", {"blocks": blocks})
    return _first_pass(kernel, shape, blocks)


def two_pass_gqa(shape: Shape, blocks: int, held: int) -> LaunchReport:
    """`sdpa_vector_2pass_1_gqa`: every simdgroup holds `held` of the query heads, and has a run of a block's tokens."""
    numbers = f"{_NAMES[shape.dtype]}, {shape.dim}, {shape.dim}, {shape.group}, {held}"
    return _first_pass(HostKernel(_HEADERS, "sdpa_vector_2pass_1_gqa", numbers, {}), shape, blocks)


def has_two_pass_gqa() -> bool:
    """Whether the installed MLX has `sdpa_vector_2pass_1_gqa`, which came with 0.32.4."""
    return "sdpa_vector_2pass_1_gqa" in flatten(_HEADERS)


def _first_pass(kernel: HostKernel, shape: Shape, blocks: int) -> LaunchReport:
    heads = shape.kv_heads * shape.group
    statistics = Output(heads * blocks * 4, 4)
    buffers = dict(enumerate([*shape.inputs, shape.output(heads * blocks), statistics, statistics]))
    numbers = dict(enumerate([_int(shape.tokens), *shape.strides, _SCALE], start=7))
    return kernel(buffers | numbers, (shape.kv_heads, 1, blocks), (32, shape.group, 1)).report


def _int(value: int) -> Buffer:
    return np.array([value], np.int32)
