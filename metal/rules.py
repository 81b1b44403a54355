"""Which kernel serves a shape, or why none does, and the variants that are checked one by one.

If several kernels serve a shape, the one whose instructions for a token are issued in the fewest cycles is used
(`KernelGeometry.cycles`). That is an estimate, not a time: it compares kernels that need the same bytes from memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from cortexmlx.metal.matrix import MatrixGeometry
from cortexmlx.metal.shape import DTYPES, QUANTIZATIONS, AttentionShape, Kernel, KernelGeometry, ShapeRule
from cortexmlx.metal.vector import VectorGeometry
from cortexmlx.metal.wide import WideGeometry

THREADGROUP_BYTES = 32 * 1024
"""The most threadgroup memory of a threadgroup. Every decode kernel stays below it (tests/metal/test_rules.py)."""
REDUCE_SIMDGROUPS = 4
REDUCE_THREADS = 32 * REDUCE_SIMDGROUPS

GEOMETRIES: dict[Kernel, type[KernelGeometry]] = {g.kernel: g for g in (MatrixGeometry, WideGeometry, VectorGeometry)}
"""The decode kernels."""

EVERY_KERNEL: tuple[ShapeRule, ...] = (
    ShapeRule(lambda s: s.dtype in DTYPES and s.kv_dtype in DTYPES, "the kernels read float32, float16 and bfloat16"),
    ShapeRule(
        lambda s: (s.kv_bits, s.quant_group) in QUANTIZATIONS,
        "quantized keys and values have 8 or 4 bits, in groups of 32 or 64",
    ),
    ShapeRule(
        lambda s: s.quant_group is None or s.key_dim % s.quant_group == s.value_dim % s.quant_group == 0,
        "a head_dim must be a multiple of the quantization group, so that no group has numbers of two heads",
    ),
)
"""The rules of all kernels."""


@dataclass(frozen=True)
class Variant(AttentionShape):
    """One instantiation of the decode and reduce kernels: an attention shape, and the kernel that serves it."""

    forced_kernel: Kernel | None = None
    """For comparisons: the kernel to use instead of the cheapest."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once because each layer of each step looks up a variant twice."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def geometry(self) -> KernelGeometry:
        """The layout of the cheapest kernel that serves the shape; if none does, of one whose `refusal` says why."""
        if self.forced_kernel is not None:
            return GEOMETRIES[self.forced_kernel](self)
        fallback_geometry = WideGeometry if self.latent or max(self.key_dim, self.value_dim) > 256 else VectorGeometry
        candidates = [geometry(self) for geometry in GEOMETRIES.values() if geometry.refusal(self) is None]
        return min(candidates, key=lambda geometry: geometry.cycles, default=fallback_geometry(self))

    @property
    def kernel(self) -> Kernel:
        """The decode kernel that serves the shape."""
        return self.geometry.kernel

    @property
    def label(self) -> str:
        """A short description of the variant for tables and logs."""
        return super().label + (f", {self.kernel.value} kernel" if self.kernel is not Kernel.VECTOR else "")


def refusal(variant: Variant) -> str | None:
    """Return the reason why the kernels do not serve a variant, or None if they do."""
    if reason := next((rule.reason for rule in EVERY_KERNEL if not rule.holds(variant)), None):
        return reason
    return variant.geometry.refusal(variant)


HALVES = ("float16", "bfloat16")
"""The dtypes of most checkpoints."""

VARIANTS: tuple[Variant, ...] = (
    *(Variant(t, t, d, d, 32, g) for t in DTYPES for d in (64, 80, 96, 112, 128, 192, 256) for g in (1, 2, 8)),
    *(Variant(t, t, 128, 128, 32, g) for t in HALVES for g in (3, 4, 5, 7, 16)),
    *(Variant(t, t, d, d, 32, 16) for t in HALVES for d in (64, 256)),
    *(Variant(t, t, 128, 128, b, g) for t in HALVES for b in (8, 16, 64, 128) for g in (2, 8)),
    *(Variant(t, t, d, d, 32, g) for t in HALVES for d, g in ((36, 3), (72, 6), (100, 4), (120, 8))),
    *(Variant(t, t, 192, 128, 32, g) for t in HALVES for g in (4, 8)),
    *(Variant(t, t, 64, 64, 32, 8, sinks=True) for t in HALVES),
    *(Variant(t, t, 256, 256, 32, 2, softcap=True) for t in HALVES),
    *(Variant(t, t, 128, 128, 32, g, alibi=True) for t in HALVES for g in (1, 4)),
    *(Variant(t, t, 512, 512, 32, 8) for t in ("float16", "bfloat16", "float32")),
    *(Variant(t, t, 576, 512, 32, 16, latent=True) for t in ("float16", "bfloat16", "float32")),
    *(Variant(t, t, 576, 512, 32, 128, latent=True) for t in HALVES),
    *(Variant(t, t, 320, 256, 32, 20, latent=True) for t in HALVES),
    *(
        Variant(t, t, d, d, 32, g, kv_bits=bits, quant_group=of)
        for t in HALVES
        for d, g, bits, of in (
            (64, 1, 8, 64),
            (64, 4, 8, 64),
            (64, 4, 4, 32),
            (128, 2, 4, 64),
            (128, 8, 8, 64),
            (128, 8, 4, 64),
            (128, 4, 8, 32),
            (256, 4, 8, 64),
            (256, 1, 4, 32),
        )
    ),
    Variant("float32", "float32", 128, 128, 32, 4, kv_bits=4, quant_group=64),
)
"""The variants that are checked one by one: by `cortexmlx doctor` on the GPU, and by Apple's compiler in continuous
integration. They cover every head_dim and dtype on each kernel that serves it, and groups, block sizes and options,
float16 and bfloat16 alike.
"""
