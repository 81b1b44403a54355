"""Problems for the decode kernels whose keys and values are quantized by MLX, and laid out by `paged_problem`.

What a row holds is what its codes stand for, in float64: the answers are those of `paged_problem`. Of dead slots and
columns the scales and biases are NaN or infinite, and the codes those of such numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from cortexmlx.metal.kernels import DecodeInputs, DecodeKernels
from cortexmlx.metal.rules import Variant
from support.kernels.paged_problem import NONE, Layout, Options, Row, lay_out, problem, random_rows, to_mlx

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Codes `[kv_heads, tokens, words]` uint32, scales and biases `[kv_heads, tokens, groups]` float32."""


def variant(group: int = 2, dim: int = 32, bits: int = 8, quant_group: int = 32, **changes: Any) -> Variant:
    """A small quantized variant; `changes` set further fields."""
    small = Variant("float32", "float32", dim, dim, 8, group, kv_bits=bits, quant_group=quant_group)
    return replace(small, **changes)


@dataclass(frozen=True)
class QuantizedRow(Row):
    """A row whose keys and values are what `key_parts` and `value_parts` stand for, in float64."""

    key_parts: Parts
    value_parts: Parts


def quantize(v: Variant, numbers: np.ndarray) -> Parts:
    """The three arrays of `mx.quantize` of numbers in the KV dtype."""
    codes, *others = mx.quantize(to_mlx(numbers, v.kv_dtype), group_size=v.quant_group, bits=v.kv_bits)
    scales, biases = (np.array(a.astype(mx.float32)) for a in others)
    return np.array(codes), scales, biases


def dequantize(bits: int, group: int, parts: Sequence[Any]) -> np.ndarray:
    """What codes stand for, in float64: bits `bits * i ..` of a word are its i-th code."""
    words = np.array(parts[0])
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts & np.uint32((1 << bits) - 1)).reshape(
        *words.shape[:-1], words.shape[-1] * len(shifts)
    )
    scales, biases = (np.array(mx.array(a).astype(mx.float32)).astype(np.float64) for a in parts[1:])
    return np.asarray(np.repeat(scales, group, axis=-1) * codes + np.repeat(biases, group, axis=-1))


def dequantized(v: Variant, parts: Parts) -> np.ndarray:
    """What a variant's codes stand for."""
    assert v.kv_bits is not None and v.quant_group is not None
    return dequantize(v.kv_bits, v.quant_group, parts)


def quantized_row(v: Variant, row: Row) -> QuantizedRow:
    """The row with quantized keys and values."""
    keys, values = quantize(v, row.keys), quantize(v, row.values)
    return QuantizedRow(row.query, dequantized(v, keys), dequantized(v, values), keys, values)


def quantized_rows(v: Variant, tokens: Sequence[int], **drawn: Any) -> list[QuantizedRow]:
    """Rows of so many tokens; `drawn` as in `random_rows`."""
    return [quantized_row(v, row) for row in random_rows(v, tokens, **drawn)]


def quantized_layouts(v: Variant, rows: Sequence[QuantizedRow], **places: Any) -> list[Layout]:
    """The codes (words as floats of the same bits), scales and biases of rows laid out, each by `lay_out`."""

    def laid_out(part: Callable[[Parts], np.ndarray]) -> Layout:
        each = [Row(row.query, part(row.key_parts), part(row.value_parts)) for row in rows]
        dims = {"key_dim": each[0].keys.shape[-1], "value_dim": each[0].values.shape[-1]}
        return lay_out(replace(v, **dims), each, **places)

    return [
        laid_out(lambda parts: parts[0].view(np.float32)),
        laid_out(lambda parts: parts[1]),
        laid_out(lambda parts: parts[2]),
    ]


def quantized_problem(
    v: Variant, rows: Sequence[QuantizedRow], options: Options = NONE, queries: np.ndarray | None = None, **places: Any
) -> tuple[Variant, int, DecodeInputs]:
    """What the kernels are called with, as `problem`; `places` as in `lay_out`."""
    seen = options.window and options.window + v.query_tokens - 1
    codes, scales, biases = quantized_layouts(v, rows, window=seen, **places)
    configured, items, inputs = problem(v, rows, options, layout=codes, queries=queries)

    def arrays(layout: Layout) -> tuple[np.ndarray, ...]:
        return layout.keys, layout.values, layout.tail_keys, layout.tail_values

    keys, values, tail_keys, tail_values = (mx.array(a.view(np.uint32)) for a in arrays(codes))
    return (
        configured,
        items,
        replace(
            inputs,
            keys=keys,
            values=values,
            tail_keys=tail_keys,
            tail_values=tail_values,
            scales=tuple(to_mlx(a, v.kv_dtype) for a in arrays(scales)),
            biases=tuple(to_mlx(a, v.kv_dtype) for a in arrays(biases)),
        ),
    )


def attend_quantized(
    kernels: DecodeKernels, v: Variant, rows: Sequence[QuantizedRow], options: Options = NONE, **places: Any
) -> np.ndarray:
    """The kernels' result, as `attend` gives it."""
    result = np.array(kernels(*quantized_problem(v, rows, options, **places)).astype(mx.float32))
    return result if "queries" in places else result[:, :, 0]
