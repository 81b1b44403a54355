"""Attention in float64, and conversion of arrays to and from the simulator's bytes."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.sim.kernel import numpy_type

Array = npt.NDArray[np.generic]

METAL_NAMES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}
"""The names of floating dtypes in MLX's templates."""


def rounded(values: npt.NDArray[np.float64], dtype: mx.Dtype) -> tuple[Array, npt.NDArray[np.float64]]:
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
