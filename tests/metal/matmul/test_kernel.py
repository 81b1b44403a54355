"""The quantized matmul in the simulator, and on a GPU with `-m metal`. MLX quantizes and dequantizes on the CPU, and
NumPy multiplies in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.metal.kernels import KernelFactory
from cortexmlx.metal.lab import sim
from cortexmlx.metal.matmul.kernel import MatmulKernel, QuantizedWeights
from cortexmlx.metal.matmul.shape import FORMATS, MAX_WORDS, MatmulShape

Floats = np.ndarray
TOLERANCE = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Of the largest number of a result: half a unit in the last place, and sums in float32."""

AFFINE, MXFP4 = ("affine", 4, 64), ("mxfp4", 4, 32)


@pytest.fixture(scope="module")
def kernel(factory: KernelFactory) -> MatmulKernel:
    return MatmulKernel(factory)


@cache
def weights_of(shape: MatmulShape) -> tuple[QuantizedWeights, Floats]:
    """Random weights, and what MLX says that they stand for."""
    matrices = (shape.experts or 1, shape.outputs, shape.inputs)
    numbers = mx.array(np.random.default_rng(5).standard_normal(matrices).astype(np.float32))
    parts = mx.quantize(numbers.astype(getattr(mx, shape.dtype)), shape.group, shape.bits, mode=shape.mode)
    wide = [part if part.dtype in (mx.uint8, mx.uint32) else part.astype(mx.float32) for part in parts]
    meant = mx.dequantize(*wide, group_size=shape.group, bits=shape.bits, mode=shape.mode).astype(mx.float32)
    if shape.experts is None:
        parts = [part[0] for part in parts]
    codes, scales, *biases = parts
    mx.eval(parts)
    return QuantizedWeights(codes, scales, biases[0] if biases else None), np.array(meant).astype(np.float64)


def rows_of(shape: MatmulShape, rows: int, seed: int = 0) -> mx.array:
    numbers = np.random.default_rng(seed).standard_normal((rows, shape.inputs))
    return mx.array(numbers.astype(np.float32)).astype(getattr(mx, shape.dtype))


def wide(numbers: mx.array) -> Floats:
    return np.array(numbers.astype(mx.float32)).astype(np.float64)


def error(got: mx.array, wanted: Floats) -> float:
    assert got.shape == wanted.shape
    return float(np.abs(wide(got) - wanted).max() / np.abs(wanted).max())


def shape_of(
    form: tuple[str, int, int], groups: int = 5, outputs: int = 43, dtype: str = "float16", experts: int | None = None
) -> MatmulShape:
    mode, bits, group = form
    return MatmulShape(dtype, mode, bits, group, groups * group, outputs, experts)


def fast_and_slow() -> Iterator[Any]:
    """Formats, dtypes and rows: each format and each dtype are among the fast ones."""
    for form in FORMATS:
        for dtype in TOLERANCE:
            for rows in (1, 8, 16, 24):
                slow = rows != (16 if form == AFFINE else 8) or (dtype != "float16" and form != AFFINE)
                yield pytest.param(form, dtype, rows, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("form", "dtype", "rows"), fast_and_slow(), ids=str)
def test_the_product_is_that_of_float64(
    kernel: MatmulKernel, form: tuple[str, int, int], dtype: str, rows: int
) -> None:
    shape = shape_of(form, dtype=dtype)
    weights, meant = weights_of(shape)
    x = rows_of(shape, rows)
    got = kernel(shape, x, weights)
    assert got.dtype == x.dtype and error(got, wide(x) @ meant[0].T) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", [AFFINE, *(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS)], ids=str)
def test_a_row_is_bitwise_the_same_alone_and_with_any_others(kernel: MatmulKernel, form: tuple[str, int, int]) -> None:
    """With few and many rows, in any place."""
    shape = shape_of(form, groups=9, outputs=35)
    weights, meant = weights_of(shape)
    x = rows_of(shape, 32)
    together = np.array(kernel(shape, x, weights))
    assert error(mx.array(together), wide(x) @ meant[0].T) < TOLERANCE["float16"]
    for rows in (1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31):
        assert np.array_equal(np.array(kernel(shape, x[:rows], weights)), together[:rows]), f"{rows} rows"
    assert np.array_equal(np.array(kernel(shape, x[::-1], weights)), together[::-1])


@pytest.mark.parametrize(("groups", "outputs"), [(1, 9), (2, 31), (3, 64), (8, 1), (11, 33)])
def test_odd_sizes(kernel: MatmulKernel, groups: int, outputs: int) -> None:
    shape = shape_of(("affine", 8, 32), groups, outputs, "float32")
    weights, meant = weights_of(shape)
    x = rows_of(shape, 5)
    with sim.options(poison=True):
        got = kernel(shape, x, weights)
    assert error(got, wide(x) @ meant[0].T) < TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (AFFINE, 24),
        (("affine", 8, 32), 8),
        *(pytest.param(f, r, marks=pytest.mark.slow) for f in FORMATS for r in (1, 16)),
    ],
    ids=str,
)
def test_each_byte_of_the_weights_is_read_once(form: tuple[str, int, int], rows: int) -> None:
    shape = shape_of(form, groups=10, outputs=64)
    weights, _ = weights_of(shape)
    kernel = MatmulKernel(sim.metal_kernel)
    with sim.recording() as recorded:
        kernel(shape, rows_of(shape, rows), weights)
    buffers = recorded.last.buffers
    assert buffers["weight_codes"].bytes_read == weights.codes.nbytes
    for name in ("weight_scales", *(["weight_biases"] if weights.biases is not None else [])):
        # The four lanes of a row of the left matrix load the same number at once, which memory gives once.
        assert buffers[name].bytes_read == 4 * buffers[name].distinct_read == 4 * weights.scales.nbytes


EVEN = (0, 1, 2, 3, 4, 5, 6, 7)
RAGGED = (3, 3, 0, 3, 5, 3, 0, 3, 3, 3, 3, 3, 5, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3)
"""Of expert 3 more pairs than are computed together."""
LONG = tuple(int(e) for e in np.random.default_rng(2).integers(0, 8, 70))


def of_experts(kernel: MatmulKernel, shape: MatmulShape, experts: Sequence[int], rows: int) -> tuple[mx.array, Floats]:
    """The matmul and that of float64."""
    weights, meant = weights_of(shape)
    x = rows_of(shape, rows)
    got = kernel.multiply_experts(shape, x, weights, mx.array(experts, mx.uint32))
    of_pair = wide(x)[np.arange(len(experts)) // (len(experts) // rows)]
    return got, np.einsum("pi,poi->po", of_pair, meant[list(experts)])


@pytest.mark.parametrize("form", [MXFP4, *(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS)], ids=str)
@pytest.mark.parametrize(
    ("experts", "rows"), [(EVEN, 4), ((6, 1), 1), ((2,) * 3, 3), (RAGGED, len(RAGGED)), (tuple(sorted(LONG)), 35)]
)
def test_each_pair_is_multiplied_with_its_experts_matrix(
    kernel: MatmulKernel, form: tuple[str, int, int], experts: Sequence[int], rows: int
) -> None:
    with sim.options(poison=True):
        got, wanted = of_experts(kernel, shape_of(form, outputs=37, experts=8), experts, rows)
    assert error(got, wanted) < TOLERANCE["float16"]


def test_experts_in_any_order_give_a_pair_the_same_bits(kernel: MatmulKernel) -> None:
    """Also those of a single matrix."""
    shape = shape_of(AFFINE, outputs=37, experts=8)
    weights, _ = weights_of(shape)
    x, order = rows_of(shape, len(LONG)), np.argsort(LONG, kind="stable")
    as_given = np.array(kernel.multiply_experts(shape, x, weights, mx.array(LONG, mx.uint32)))
    ordered = np.array(
        kernel.multiply_experts(shape, x[mx.array(order)], weights, mx.array(np.array(LONG)[order], mx.uint32))
    )
    assert np.array_equal(as_given[order], ordered)
    one = QuantizedWeights(*(part[LONG[9]] for part in weights.arrays))
    alone = kernel(shape_of(AFFINE, outputs=37), x[9:10], one)
    assert np.array_equal(np.array(alone)[0], as_given[9])


def test_weights_of_an_expert_are_read_once_for_all_of_its_pairs() -> None:
    shape = shape_of(AFFINE, groups=8, outputs=32, experts=8)
    weights, _ = weights_of(shape)
    experts = mx.array([1, 5, 1, 1, 5, 7, 1, 5] * 4, mx.uint32)  # 16 times 1, 12 times 5, 4 times 7
    kernel = MatmulKernel(sim.metal_kernel)
    with sim.recording() as recorded:
        kernel.multiply_experts(shape, rows_of(shape, 32), weights, experts)
    assert recorded.last.buffers["weight_codes"].bytes_read == 3 * weights.codes.nbytes // 8


def test_the_last_of_as_many_words_as_are_counted() -> None:
    """The last of so many experts that their codes are all that is not refused, all others being zero."""
    shape = shape_of(AFFINE, groups=2, outputs=40, experts=MAX_WORDS // (40 * 16))
    weights, meant = weights_of(shape_of(AFFINE, groups=2, outputs=40))
    last = (shape.experts or 0) - 1

    def only_the_last(array: mx.array) -> sim.SparseArray:
        made = sim.SparseArray((last + 1, *array.shape), array.dtype)
        made.put((last, 0, 0), array)
        return made

    many = QuantizedWeights(*(only_the_last(part) for part in weights.arrays))  # type: ignore[arg-type]
    assert weights.codes.size * (last + 2) > MAX_WORDS
    x = rows_of(shape, 3)
    got = MatmulKernel(sim.metal_kernel).multiply_experts(shape, x, many, mx.array([last] * 3, mx.uint32))
    assert error(got, wide(x) @ meant[0].T) < TOLERANCE["float16"]


def test_slices_are_summed_in_single_precision(kernel: MatmulKernel) -> None:
    """Two slices, of which one is nearly the other with the other sign."""
    shape = shape_of(AFFINE, groups=2)
    weights, meant = weights_of(shape)
    first, second = np.split(meant[0], 2, axis=1)
    half = wide(rows_of(shape, 8))[:, :64]
    x = mx.array(np.concatenate([half, -1.01 * half @ first.T @ np.linalg.pinv(second).T], axis=1)).astype(mx.float16)
    assert error(kernel(shape, x, weights), wide(x) @ meant[0].T) < TOLERANCE["float16"]


def test_every_code_of_mxfp4_is_its_number(kernel: MatmulKernel) -> None:
    """Rows of the identity, multiplied with codes 0 to 15 under scales from 2^-14 to 2^8."""
    shape = MatmulShape("float32", "mxfp4", 4, 32, 32, 23)
    codes = np.tile(np.array([0x76543210, 0xFEDCBA98] * 2, np.uint32), (23, 1))
    scales = (127 + np.arange(-14, 9)).astype(np.uint8)[:, None]
    weights = QuantizedWeights(mx.array(codes), mx.array(scales), None)
    meant = np.array(
        mx.dequantize(weights.codes, weights.scales, group_size=32, bits=4, mode="mxfp4").astype(mx.float32)
    )
    assert np.array_equal(np.array(kernel(shape, mx.eye(32), weights)).T, meant)
    assert set(np.abs(meant[14])) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}, "of scale 1"


def test_a_row_of_nan_is_no_other_rows(kernel: MatmulKernel) -> None:
    """Rows that are not live are computed and ignored, whatever is in them."""
    shape = shape_of(AFFINE)
    weights, _ = weights_of(shape)
    x = rows_of(shape, 11)
    wanted = np.array(kernel(shape, x, weights))
    strange = np.array(x)
    strange[[2, 9]] = np.nan
    strange[5] = np.inf
    got = np.array(kernel(shape, mx.array(strange), weights))
    others = [0, 1, 3, 4, 6, 7, 8, 10]
    assert np.array_equal(got[others], wanted[others]) and np.isnan(got[2]).all()


def test_rows_that_do_not_lie_one_after_the_other(kernel: MatmulKernel) -> None:
    """A view of every second row, turned over, of an array that is not contiguous."""
    shape = shape_of(AFFINE)
    weights, meant = weights_of(shape)
    x = mx.contiguous(rows_of(shape, 8).T).T[::-2]
    assert error(kernel(shape, x, weights), wide(x) @ meant[0].T) < TOLERANCE["float16"]


def test_all_shapes_of_a_format_share_a_text() -> None:
    """So that a model compiles few kernels: rows of a tile, and matrices of any size."""
    kernel, texts = MatmulKernel(sim.metal_kernel), set()
    dense = kernel._kernels["affine", False]
    for groups, outputs, rows in ((8, 64, 9), (9, 100, 16)):
        shape = shape_of(AFFINE, groups, outputs)
        weights, _ = weights_of(shape)
        kernel(shape, rows_of(shape, rows), weights)
        template = [("T", mx.float16), ("BITS", 4), ("GROUP", 64), ("SLICES", shape.slices), ("TILES", 2)]
        texts.add(dense.text([rows_of(shape, rows), *weights.arrays], [mx.float16], template).text)
    assert len(texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_number_of_rows(kernel: MatmulKernel, form: tuple[str, int, int]) -> None:
    shape = shape_of(form, groups=9, outputs=35)
    weights, meant = weights_of(shape)
    x = rows_of(shape, 32)
    together = np.array(kernel(shape, x, weights))
    for rows in range(1, 33):
        got = kernel(shape, x[:rows], weights)
        assert error(got, wide(x[:rows]) @ meant[0].T) < TOLERANCE["float16"]
        assert np.array_equal(np.array(got), together[:rows]), f"{rows} rows"
