"""Quantized layers whose scales are finer than the activations. They compute in float32, and return the activations'
type.

The scale of a group in Q4_K and Q5_K is a product of 17 bits. Neither float16 nor bfloat16 holds it. MLX multiplies in
the wider of two types and returns that type. Then the whole model would be float32, and its KV cache too.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from cortexmlx.models.gguf.blocks import GROUP
from cortexmlx.models.gguf.tensors import PackedArrays


class FineLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """A packed linear layer that returns its input's type."""

    def __call__(self, x: mx.array) -> mx.array:
        answer: mx.array = super().__call__(x)
        return answer.astype(x.dtype)


class FineSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]
    """A packed linear layer of many experts that returns its input's type."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        answer: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
        return answer.astype(x.dtype)


class FineEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A packed embedding that returns vectors of the type `dtype`. As an output projection it returns its input's
    type.
    """

    dtype: mx.Dtype

    def __call__(self, x: mx.array) -> mx.array:
        vectors: mx.array = super().__call__(x)
        return vectors.astype(self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        answer: mx.array = super().as_linear(x)
        return answer.astype(x.dtype)


def packed_layer(plain: Any, arrays: PackedArrays, dtype: mx.Dtype) -> Any:
    """Return a quantized layer to replace `plain`; None if there is no such layer. Its parameters are loaded later.

    `dtype` is the type of the activations. Nothing is computed: the weights that the constructors draw are never
    evaluated.
    """
    fine = arrays.scales.dtype not in (dtype, mx.uint8)
    how = {"group_size": GROUP, "bits": arrays.bits, "mode": arrays.mode}
    if isinstance(plain, nn.Linear):
        rows, columns = plain.weight.shape
        linear = FineLinear if fine else nn.QuantizedLinear
        return linear(columns, rows, "bias" in plain, **how)
    if isinstance(plain, SwitchLinear):
        experts, rows, columns = plain.weight.shape
        switch = FineSwitchLinear if fine else QuantizedSwitchLinear
        return switch(columns, rows, experts, "bias" in plain, **how)
    if isinstance(plain, nn.Embedding):
        if not fine:
            return nn.QuantizedEmbedding(*plain.weight.shape, **how)
        embedding = FineEmbedding(*plain.weight.shape, **how)
        embedding.dtype = dtype
        return embedding
    return None
