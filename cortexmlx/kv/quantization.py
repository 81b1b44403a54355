"""Quantized keys and values: MLX's affine format, `number = scale * code + bias`, along the dims of a head.

A quantized slab is a `Slab` of six arrays, head-major as every slab: of keys the codes `[kv_heads, slots, dim * bits /
32]` uint32, scales and biases `[kv_heads, slots, dim / group]`, and the same of values. A tail is six such arrays
`[rows, kv_heads, W, ...]`. It keeps codes, too, because what they stand for, quantized once more, need not be the same
bits: so a token is the same before and after it moves to the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

PARTS = 3
"""Arrays that say what keys, or values, are: codes, scales, biases."""


@dataclass(frozen=True)
class Quantization:
    """How keys and values are quantized: `bits` of a code, 8 or 4, and the `group` of numbers that share a scale."""

    bits: int
    group: int

    def quantize(self, *numbers: mx.array) -> tuple[mx.array, ...]:
        """Codes, scales and biases of each array `[..., dim]`, one after the other."""
        return tuple(part for array in numbers for part in mx.quantize(array, group_size=self.group, bits=self.bits))

    def dequantize(self, parts: Sequence[mx.array]) -> tuple[mx.array, ...]:
        """What `quantize` gave for some arrays, as numbers again `[..., dim]`, in the dtype of the scales."""
        each = zip(parts[::PARTS], parts[1::PARTS], parts[2::PARTS], strict=True)
        return tuple(mx.dequantize(c, s, b, group_size=self.group, bits=self.bits) for c, s, b in each)
