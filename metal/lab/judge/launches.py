"""What the judged kernels share: arrays as the simulator's bytes, one launch of a kernel from MLX's headers, and
attention in float64.

(y,) = launch("sdpa_blocked.h", "sdpa_blocked_scale_copy", "float", {0: x, 1: ResultArray((4, 40), F32), ...}, ...)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.sim.buffers import Triple
from cortexmlx.metal.lab.sim.host import HostKernel, ResultArray
from cortexmlx.metal.lab.sim.kernel import numpy_type

Array = npt.NDArray[np.generic]

NAMES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
"""The names of dtypes in MLX's templates."""

F32 = mx.float32
Wide = npt.NDArray[np.float64]


def round_to(values: npt.NDArray[np.float64], dtype: mx.Dtype) -> tuple[Array, npt.NDArray[np.float64]]:
    """Return the values rounded to `dtype`, as host bits (bfloat16: uint16) and as float64."""
    array = mx.array(values.astype(np.float32)).astype(dtype)
    bits = np.array(array.view(mx.uint16)) if dtype == mx.bfloat16 else np.array(array)
    return bits, np.array(array.astype(mx.float32)).astype(np.float64)


def from_bits(data: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: mx.Dtype) -> npt.NDArray[np.float64]:
    """Return the bytes of a simulated output as float64 numbers."""
    bits = data.view(numpy_type(dtype)).reshape(shape)
    values = (bits.astype(np.uint32) << 16).view(np.float32) if dtype == mx.bfloat16 else bits
    return values.astype(np.float64)


@dataclass(frozen=True)
class AttentionProblem:
    """An attention problem in float64: q [B, H, L, D], k and v [B, KH, N, D].

    `mask` is [L, N], bool or additive; `sinks` is [H].
    """

    q: npt.NDArray[np.float64]
    k: npt.NDArray[np.float64]
    v: npt.NDArray[np.float64]
    scale: float
    causal: bool = False
    mask: npt.NDArray[np.generic] | None = None
    sinks: npt.NDArray[np.float64] | None = None

    def solve(self) -> npt.NDArray[np.float64]:
        """Return softmax(scale * q.k + mask).v, `[B, H, L, Dv]`, with an optional sink in the denominator."""
        groups = self.q.shape[1] // self.k.shape[1]
        k, v = np.repeat(self.k, groups, 1), np.repeat(self.v, groups, 1)
        scores = np.einsum("bhqd,bhkd->bhqk", self.q, k) * self.scale
        length, total = scores.shape[-2:]
        if self.causal:
            allowed = np.arange(total)[None] <= np.arange(length)[:, None] + total - length
            scores = np.where(allowed, scores, -np.inf)
        if self.mask is not None:
            scores = np.where(self.mask, scores, -np.inf) if self.mask.dtype == bool else scores + self.mask
        if self.sinks is not None:
            sink = np.broadcast_to(self.sinks[None, :, None, None], (*scores.shape[:3], 1))
            scores = np.concatenate([scores, sink], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out: npt.NDArray[np.float64] = np.einsum("bhqk,bhkd->bhqd", weights[..., :total], v)
        return out


def draw(seed: int, shape: tuple[int, ...], dtype: mx.Dtype, scale: float = 1.0) -> tuple[Array, Wide]:
    """Return normally distributed numbers, rounded to a type: as the kernel gets them, and as float64."""
    return round_to(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def i32(*values: int) -> Array:
    """Return 32-bit signed numbers, as a host passes them by `set_bytes`."""
    return np.array(values, dtype=np.int32)


def i64(*values: int) -> Array:
    """Return 64-bit numbers: strides and sizes, signed or unsigned."""
    return np.array(values, dtype=np.int64)


def f32(*values: float) -> Array:
    """Return 32-bit floats."""
    return np.array(values, dtype=np.float32)


def contiguous_arguments(keys: Array, scale: float) -> list[Array]:
    """Return the arguments of MLX's vector attention for contiguous keys and values `[..., tokens, head_dim]`, in
    order: the number of tokens, the strides by head and by token of keys and of values, and the scale.
    """
    tokens, head_dim = keys.shape[-2:]
    strides = [i64(tokens * head_dim), i64(head_dim)]
    return [i32(tokens), *strides, *strides, f32(scale)]


def launch(
    headers: str | Sequence[str],
    function: str,
    template: str,
    buffers: Mapping[int, Array | ResultArray],
    *,
    threadgroup: Triple,
    threads: Triple | None = None,
    groups: Triple | None = None,
    constants: Mapping[str, int | bool] | None = None,
) -> list[Wide]:
    """Run one instantiation over `threads` threads or `groups` threadgroups; return its results in the signature's
    order.
    """
    kernel = HostKernel((headers,) if isinstance(headers, str) else headers, function, template, constants or {})
    grid = threads or tuple(g * t for g, t in zip(groups or (1, 1, 1), threadgroup, strict=True))
    done = kernel(buffers, (grid[0], grid[1], grid[2]), threadgroup)
    results = [result for slot in kernel.slots if isinstance(result := buffers.get(slot), ResultArray)]
    return [from_bits(data, each.shape, each.dtype) for data, each in zip(done.outputs, results, strict=True)]
