"""MLX's merge sort of values and indices, in one block and in several; its binary search; its Hadamard transform."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Floats, KernelCase
from cortexmlx.metal.lab.judge.launches import (
    BF16,
    F16,
    F32,
    FLOATS,
    NAMES,
    Array,
    ResultArray,
    Wide,
    draw,
    f32,
    i32,
    i64,
    launch,
    u32,
)
from cortexmlx.metal.lab.sim.kernel import numpy_type


def _keys(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[Array, Wide]:
    """Return numbers of which some are equal, so that an unstable sort shows."""
    bits, x = draw(sum(shape), shape, dtype)
    bits[..., 1::7] = bits[..., :1]
    x[..., 1::7] = x[..., :1]
    return bits, x


def _block(dtype: mx.Dtype, shape: tuple[int, int], indices: bool, column: bool, threads: int) -> tuple[Floats, Floats]:
    """Sort [rows, size], one threadgroup per row. `column` takes the kernel for any strides, and sorts down columns."""
    rows, size = shape
    bits, x = _keys(shape, dtype)
    out = mx.uint32 if indices else dtype
    template = f"{NAMES[dtype]}, {NAMES[out]}, {str(indices).lower()}, {threads}, 4"
    common: dict[int, Array | ResultArray] = {2: i32(size)}
    if column:
        bits = np.ascontiguousarray(bits.T)
        common |= {0: bits, 1: ResultArray((size, rows), out), 3: i32(rows), 4: i32(rows)}
        common |= {5: i32(1), 6: i32(rows), 7: i64(1), 8: i64(1)}
    else:
        common |= {0: bits, 1: ResultArray(shape, out), 3: i32(1), 4: i32(1), 5: i32(size), 6: i32(size)}
    (y,) = launch(
        "sort.h",
        "block_sort_nc" if column else "block_sort",
        template,
        common,
        groups=(1, rows, 1),
        threadgroup=(threads, 1, 1),
    )
    order = np.argsort(x, axis=1, kind="stable")
    expected = order.astype(np.float64) if indices else np.take_along_axis(x, order, axis=1)
    return (y.T if column else y), expected


def _blocks(dtype: mx.Dtype, rows: int, size: int, threads: int) -> tuple[Floats, Floats]:
    """Sort with several blocks per row, merged in pairs as MLX's host does. Values and indices are compared."""
    bits, x = _keys((rows, size), dtype)
    blocks = -(-size // (threads * 4))
    template = f"{NAMES[dtype]}, uint32_t, true, {threads}, 4"
    values, places = launch(
        "sort.h",
        "mb_block_sort",
        template,
        {
            0: bits,
            1: ResultArray((rows, size), dtype),
            2: ResultArray((rows, size), mx.uint32),
            3: i32(size),
            4: i32(1),
            5: i32(1),
            6: i32(rows),
            7: i64(size),
        },
        groups=(blocks, rows, 1),
        threadgroup=(threads, 1, 1),
    )
    tiles = 2
    while tiles // 2 < blocks:
        given = {1: _bits(values, dtype), 2: places.astype(np.uint32)}
        (cuts,) = launch(
            "sort.h",
            "mb_block_partition",
            template,
            {0: ResultArray((rows, blocks + 1), mx.uint32), **given, 3: i32(size), 4: i32(tiles), 5: i32(blocks)},
            groups=(1, rows, 1),
            threadgroup=(blocks + 1, 1, 1),
        )
        values, places = launch(
            "sort.h",
            "mb_block_merge",
            template,
            {
                0: cuts.astype(np.uint32),
                **given,
                3: ResultArray((rows, size), dtype),
                4: ResultArray((rows, size), mx.uint32),
                5: i32(size),
                6: i32(tiles),
                7: i32(blocks),
            },
            groups=(blocks, rows, 1),
            threadgroup=(threads, 1, 1),
        )
        tiles *= 2
    order = np.argsort(x, axis=1, kind="stable")
    return np.stack([values, places]), np.stack([np.take_along_axis(x, order, axis=1), order.astype(np.float64)])


def _bits(values: Wide, dtype: mx.Dtype) -> Array:
    if dtype == BF16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(numpy_type(dtype))


def _search(dtype: mx.Dtype, right: bool) -> tuple[Floats, Floats]:
    bits, x = draw(1, (90,), dtype)
    order = np.argsort(x, kind="stable")
    bits, x = bits[order], x[order]
    wanted_bits, wanted = draw(2, (70,), dtype)
    wanted_bits[:20], wanted[:20] = bits[10:30], x[10:30]
    (y,) = launch(
        ("sort.h", "searchsorted.h"),
        "searchsorted",
        f"{NAMES[dtype]}, {str(right).lower()}",
        {0: np.repeat(bits, 2), 1: wanted_bits, 2: ResultArray((70,), mx.uint32), 3: u32(90), 4: i64(2)},
        threads=(70, 1, 1),
        threadgroup=(64, 1, 1),
    )
    return y, np.searchsorted(x, wanted, "right" if right else "left").astype(np.float64)


def _hadamard_matrix(n: int) -> Wide:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def _hadamard(dtype: mx.Dtype, n: int, stride: int) -> tuple[Floats, Floats]:
    """Run a transform of n numbers along rows or, for `stride` above 1, strided; MLX then scales in another launch."""
    batch, radix, width = 2, min(n, 16), 2 if n == 2 else 4
    scale = 0.25 if stride == 1 else 1.0
    bits, x = draw(n, (batch, n, stride), dtype)
    (y,) = launch(
        "hadamard.h",
        "hadamard_n",
        f"{NAMES[dtype]}, {n}, {radix}, {width}, {stride}",
        {0: bits, 1: ResultArray((batch, n, stride), dtype), 2: f32(scale)},
        threads=(n // radix, batch, stride),
        threadgroup=(n // radix, 1, 1),
        before="METAL_FUNC void hadamard_radix_m(thread float *x) {}\n",
    )
    return y, np.einsum("ij,bjs->bis", _hadamard_matrix(n), x) * scale


def _hadamard_m(dtype: mx.Dtype, n: int, width: int) -> tuple[Floats, Floats]:
    """Run the second stage of a transform of m * n numbers, for m = 12. MLX's host writes its codelet from a matrix."""
    m, batch, scale = 12, 4, 0.5
    matrix = _paley12()
    rows = "".join(
        f"  tmp[{i}] = " + " ".join(f"{'+' if v > 0 else '-'} x[{j}]" for j, v in enumerate(row)) + ";\n"
        for i, row in enumerate(matrix)
    )
    codelet = f"METAL_FUNC void hadamard_radix_m(thread float *x) {{\n  float tmp[{m}];\n{rows}"
    codelet += f"  for (int i = 0; i < {m}; i++) {{ x[i] = tmp[i]; }}\n}}\n"
    bits, x = draw(n + m, (batch, m, n), dtype)
    group = min(n // width, 256)
    (y,) = launch(
        "hadamard.h",
        "hadamard_m",
        f"{NAMES[dtype]}, {n}, {m}, {width}",
        {0: bits, 1: ResultArray(x.shape, dtype), 2: f32(scale)},
        threads=(group, x.size // m // width // group, 1),
        threadgroup=(group, 1, 1),
        before=codelet,
    )
    return y, np.einsum("ij,bjn->bin", matrix, x) * scale


def _paley12() -> Wide:
    """Return Paley's Hadamard matrix of order 12, from the squares modulo 11."""
    squares = {i * i % 11 for i in range(1, 11)}
    q = np.array([[0 if i == j else 1 if (i - j) % 11 in squares else -1 for j in range(11)] for i in range(11)])
    s = np.block([[np.zeros((1, 1)), np.ones((1, 11))], [-np.ones((11, 1)), q]])
    return s + np.eye(12)


def cases() -> Iterator[KernelCase]:
    """Yield sizes that fill a block, sizes that do not, and sizes that take two and three rounds of merging."""
    for dtype in (F32, F16, BF16, mx.int32, mx.uint8):
        name = NAMES[dtype]
        for indices in (False, True):
            what = "indices" if indices else "values"
            for size, threads in ((100, 32), (256, 64)):
                for column in (False, True):
                    kernel = "block_sort_nc" if column else "block_sort"
                    run = partial(_block, dtype, (3, size), indices, column, threads)
                    yield KernelCase("MLX", f"{kernel} {what} {name} {size}", run, 0.0)
        if dtype != mx.uint8:
            for rows, size in ((2, 200), (1, 700)):
                yield KernelCase(
                    "MLX", f"mb_block_sort {name} {rows}x{size}", partial(_blocks, dtype, rows, size, 32), 0.0
                )
            for right in (False, True):
                side = "right" if right else "left"
                yield KernelCase("MLX", f"searchsorted {side} {name}", partial(_search, dtype, right), 0.0)
    for dtype in FLOATS:
        for n, stride in ((2, 1), (64, 1), (512, 1), (1024, 1), (32, 3), (128, 8)):
            title = f"hadamard_n {NAMES[dtype]} {n} stride {stride}"
            yield KernelCase("MLX", title, partial(_hadamard, dtype, n, stride), TOLERANCE[dtype] * 8)
        for n, width in ((64, 4), (2, 2)):
            title = f"hadamard_m {NAMES[dtype]} 12x{n}"
            yield KernelCase("MLX", title, partial(_hadamard_m, dtype, n, width), TOLERANCE[dtype] * 8)
