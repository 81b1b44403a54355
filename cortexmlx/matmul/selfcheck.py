"""Checks the quantized matmul on the GPU itself, against float64, at first use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.attention.selfcheck import UNWRITTEN_VALUE, VariantCheck, max_difference, read_output, run_check
from cortexmlx.metal.matmul.kernel import MatmulKernel, QuantizedWeights
from cortexmlx.metal.matmul.shape import (
    EXPERT_ROWS,
    OUTPUTS,
    SLICES,
    TILE,
    MatmulShape,
    MatmulVariant,
    refusal,
)


def check_matmul(kernel: MatmulKernel, shape: MatmulShape, rows: int) -> VariantCheck:
    """Check our kernel on a small matmul of a shape and number of rows, and on one with many inputs. A failure of the
    kernel is returned as a result. A failure of earlier work in flight is raised.
    """

    def measure_problem_error(p: MatmulProblem) -> float:
        if p.experts is None:
            output = kernel(p.shape, p.rows, p.weights, init_value=UNWRITTEN_VALUE)
        else:
            output = kernel.multiply_experts(p.shape, p.rows, p.weights, p.experts, init_value=UNWRITTEN_VALUE)
        return max_difference(read_output("matmul", p.shape.threads, output), p.expected)

    def measure_error() -> float:
        error = measure_problem_error(make_problem(shape, rows))
        return max(error, measure_problem_error(make_large_problem(shape, rows))) if shape.slices == SLICES else error

    return run_check(MatmulVariant(shape, rows), refusal(shape, rows), measure_error, judge="the matmul in float64")


# Small problems for the quantized matmul, and their answers in float64 by NumPy. Nothing of MLX computes them.


EXPERTS = (0,) * (2 * EXPERT_ROWS + 8) + (3, 1, 1, 3, 1)
"""The expert of each pair: one with more pairs than two rounds compute, some whose pairs lie apart, one without."""

_FAR_OFFSET = 1 << 16
"""An offset that 16 bits do not hold."""

_LARGE_POWER, _HALF_POWER = 17, -4
"""Powers of two by which the activations of large matmuls differ. No half holds the larger ones. With halves they are
smaller, since the scales of that many inputs would be subnormal otherwise.
"""

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of MXFP4's codes, by exponent and fraction (OCP Microscaling Formats, version 1.0)."""

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MatmulProblem:
    """A small matmul and its exact result: `rows` times `weights`, or those of `experts`, gives `expected` `[rows or
    pairs, outputs]`.
    """

    shape: MatmulShape
    rows: mx.array
    weights: QuantizedWeights
    experts: mx.array | None
    expected: Float64Array


def make_problem(shape: MatmulShape, rows: int, seed: int = 7) -> MatmulProblem:
    """Return a small matmul that tests the kernel for a shape and number of rows: it has the shape's slices, with
    unequal numbers of groups, and a last threadgroup with a single output. The results are of order 1.
    """
    return _draw_problem(shape, (2 * shape.slices - 1) * shape.group, rows, 0, seed)


def make_large_problem(shape: MatmulShape, rows: int, seed: int = 8) -> MatmulProblem:
    """Return a matmul with so many inputs that offsets of rows need more than 16 bits, and with activations beyond a
    half's range if the dtype holds them. The results are of order 1. The rows are those of whole tiles, so that few
    rows need no more memory.
    """
    rows = -(-rows // TILE) * TILE
    row_count = len(EXPERTS) if shape.experts else rows
    groups = -(-_FAR_OFFSET // (row_count - 1) // shape.group) + 1
    power = _HALF_POWER if shape.dtype == "float16" else _LARGE_POWER
    return _draw_problem(shape, max(groups, 2 * SLICES) * shape.group, rows, power, seed)


def _draw_problem(shape: MatmulShape, inputs: int, rows: int, power: int, seed: int) -> MatmulProblem:
    """Draw the random inputs of a matmul. Activations are 2^`power` times larger than usual, and weights as
    much smaller.
    """
    small_shape = replace(
        shape,
        inputs=inputs,
        outputs=OUTPUTS + 1,
        experts=None if shape.experts is None else max(EXPERTS) + 1,
    )
    random = np.random.default_rng(seed)
    matrices = [draw_weights(small_shape, random, power) for _ in range(small_shape.experts or 1)]
    pairs = EXPERTS if small_shape.experts else ()
    x = (np.clip(np.rint(16 * random.standard_normal((len(pairs) or rows, small_shape.inputs))), -63, 63) / 16).astype(
        np.float32
    ) * np.float32(2.0**power)
    row_experts = pairs or (0,) * rows
    expected = np.stack([matrices[e][1] @ row.astype(np.float64) for e, row in zip(row_experts, x, strict=True)])
    stacked_arrays = [np.stack(arrays) for arrays in zip(*(parts for parts, _ in matrices), strict=True)]
    return MatmulProblem(
        small_shape,
        mx.array(x).astype(getattr(mx, small_shape.dtype)),
        make_mlx_weights(
            small_shape, stacked_arrays if small_shape.experts else [array[0] for array in stacked_arrays]
        ),
        mx.array(pairs, mx.uint32) if pairs else None,
        expected,
    )


def draw_weights(
    shape: MatmulShape, random: np.random.Generator, power: int = 0
) -> tuple[list[npt.NDArray[np.generic]], Float64Array]:
    """Draw random quantized weights, for activations that are 2^`power` times larger than usual. Return their arrays
    `[outputs, ...]` (codes, scales and, if affine, biases), and the numbers that they stand for. Scales and biases are
    exact in every dtype.
    """
    codes = random.integers(0, 1 << shape.bits, (shape.outputs, shape.inputs), np.uint32)
    per_group = (shape.outputs, shape.inputs // shape.group)
    power = -power - round(np.log2(shape.inputs**0.5 * 2**shape.bits))  # the sum of as many products is of order 1
    words = _pack(codes, shape.bits)
    if shape.mode == "mxfp4":
        exponents = random.integers(power, power + 3, per_group)
        magnitude = _E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
        return [words, (exponents + 127).astype(np.uint8)], magnitude * np.repeat(2.0**exponents, shape.group, 1)
    scales = random.choice([1.0, -1.25, 1.5], per_group) * 2.0**power
    biases = random.choice([0.75, 1.0, 1.25], per_group) * -np.sign(scales) * 2.0 ** (power + shape.bits - 1)
    numbers = codes * np.repeat(scales, shape.group, 1) + np.repeat(biases, shape.group, 1)
    return [words, scales.astype(np.float32), biases.astype(np.float32)], numbers


def make_mlx_weights(shape: MatmulShape, parts: list[npt.NDArray[np.generic]]) -> QuantizedWeights:
    """Return the arrays of `draw_weights` as MLX arrays, as the kernel reads them."""
    codes, scales, *biases = (mx.array(part) for part in parts)
    dtype = getattr(mx, shape.dtype)
    if shape.mode == "mxfp4":
        return QuantizedWeights(codes, scales, None)
    return QuantizedWeights(codes, scales.astype(dtype), biases[0].astype(dtype))


def _pack(codes: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    """Pack codes into 32-bit words, the first in the lowest bits."""
    codes_per_word = 32 // bits
    shifted_codes = codes.reshape(len(codes), -1, codes_per_word) << (
        np.arange(codes_per_word, dtype=np.uint32) * np.uint32(bits)
    )
    words: npt.NDArray[np.uint32] = np.bitwise_or.reduce(shifted_codes, axis=-1)
    return words
