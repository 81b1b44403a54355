"""MLX's affine quantization: products with one or a few vectors in both directions, tiles, and unpacking."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Defect, KernelCase, ResultAndExpected
from cortexmlx.metal.lab.judge.launches import (
    F32,
    NAMES,
    Array,
    Wide,
    draw,
    i32,
    launch,
)
from cortexmlx.metal.lab.sim.host import ResultArray
from cortexmlx.metal.lab.sim.report import Fault

Bytes = npt.NDArray[np.uint8]
HEADERS = ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")


def pack(numbers: npt.NDArray[np.integer], bits: int) -> Bytes:
    """Pack small numbers [rows, count], the first in the lowest bits: bytes [rows, count * bits / 8]."""
    flags = (numbers[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(flags.reshape(len(numbers), -1), axis=1, bitorder="little")


class _Weights:
    """Random quantized weights [rows, columns]: packed, scales, biases, and their `dequantized` float64 values."""

    def __init__(self, dtype: mx.Dtype, rows: int, columns: int, group: int, bits: int) -> None:
        numbers: npt.NDArray[np.int64] = np.random.default_rng(rows + bits).integers(0, 1 << bits, (rows, columns))
        self.data = pack(numbers, bits)
        scale_bits, scale = draw(1, (rows, columns // group), dtype, 1.0 / (1 << bits))
        bias_bits, bias = draw(2, (rows, columns // group), dtype, 0.3)
        self.scales, self.biases = scale_bits, bias_bits
        self.dequantized: Wide = numbers.astype(np.float64) * np.repeat(scale, group, 1) + np.repeat(bias, group, 1)


def _run_product(kernel: str, dtype: mx.Dtype, group: int, bits: int, shape: tuple[int, int, int]) -> ResultAndExpected:
    """Run one product; return its result and the expected one. `shape` is (vectors, inputs, outputs).

    Weights are [outputs, inputs]; for qvm and qmm_n they are [inputs, outputs].
    """
    vectors, inputs, outputs = shape
    by_rows = kernel in ("qvm", "qmm_n")
    w = _Weights(dtype, *((inputs, outputs) if by_rows else (outputs, inputs)), group, bits)
    x_bits, x = draw(3, (vectors, inputs), dtype)
    buffers: dict[int, Array | ResultArray] = {
        0: w.data,
        1: w.scales,
        2: w.biases,
        3: x_bits,
        4: ResultArray((vectors, outputs), dtype),
        5: i32(inputs),
        6: i32(outputs),
        7: i32(vectors),
    }
    template = f"{NAMES[dtype]}, {group}, {bits}"
    if kernel == "qmv_quad":
        template, grid, threads = f"{template}, {inputs}, false", (vectors, -(-outputs // 64), 1), (32, 1, 1)
    elif kernel in ("qmv", "qmv_fast"):
        template, grid, threads = template + ", false", (vectors, -(-outputs // 8), 1), (32, 2, 1)
    elif kernel == "qmv_wide":
        tile = min(vectors, 3)
        template, grid = f"{template}, {tile}, 8, false", (-(-vectors // tile), -(-outputs // 8), 1)
        threads = (32, 2, 1)
    elif kernel == "qvm":
        template, grid, threads = template + ", false", (vectors, -(-outputs // 64), 1), (32, 2, 1)
    else:
        aligned = "" if kernel == "qmm_n" else f", {str(outputs % 32 == 0).lower()}"
        template = f"{template}{aligned}, false"
        grid, threads = (-(-outputs // 32), -(-vectors // 32), 1), (32, 2, 2)
    (y,) = launch(HEADERS, f"affine_{kernel}", template, buffers, groups=grid, threadgroup=threads)
    return y, x @ (w.dequantized if by_rows else w.dequantized.T)


def _run_dequantize(dtype: mx.Dtype, group: int, bits: int) -> ResultAndExpected:
    rows, columns = 3, 256
    w = _Weights(dtype, rows, columns, group, bits)
    per_thread = {3: 8, 5: 8, 6: 4}.get(bits, 8 // bits)
    (y,) = launch(
        HEADERS,
        "affine_dequantize",
        f"{NAMES[dtype]}, {group}, {bits}",
        {0: w.data, 1: w.scales, 2: w.biases, 3: ResultArray((rows, columns), dtype)},
        threads=(rows * columns // per_thread, 1, 1),
        threadgroup=(64, 1, 1),
    )
    return y, w.dequantized


_BEYOND_THE_ROWS = Defect(
    Fault.OUT_OF_BOUNDS,
    "MLX's affine_qmv_quad reads the scale and bias of rows beyond the last before it asks whether there is such a row",
)


def cases() -> Iterator[KernelCase]:
    """Yield the cases of every combination of bits and group, with sizes for the aligned and the ragged paths."""
    for dtype, name in NAMES.items():
        for group, bits in ((64, 4), (32, 8), (128, 2), (64, 3), (64, 5), (32, 6), (64, 8)):
            widths = f"{name} {bits} bits in {group}"
            few = dtype == F32 or bits == 4
            tolerance = TOLERANCE[dtype] * 4
            shapes = [
                ("qmv", (2, 256, 19)),
                ("qmv_fast", (1, 1024, 16)),
                ("qvm", (2, 130, 128)),
                ("qmv_wide", (5, 256, 19)),
            ]
            if bits in (4, 8):
                shapes += [("qmm_t", (9, 128, 40)), ("qmm_t", (33, 128, 64)), ("qmm_n", (9, 64, 128))]
                shapes += [("qmv_quad", (3, 64, 70)), ("qmv_quad", (1, 128, 64))]
            for kernel, shape in shapes if few else ():
                if group > shape[1] or (kernel == "qmm_n" and group > shape[2]):
                    continue
                title = f"affine_{kernel} {widths} {shape[0]} of {shape[1]} to {shape[2]}"
                beyond = _BEYOND_THE_ROWS if kernel == "qmv_quad" and shape[2] % 64 else None
                run = partial(_run_product, kernel, dtype, group, bits, shape)
                yield KernelCase("MLX", title, run, tolerance, defect=beyond)
            yield KernelCase(
                "MLX", f"affine_dequantize {widths}", partial(_run_dequantize, dtype, group, bits), TOLERANCE[dtype]
            )
