"""MLX's kernels for rows of logits and dot products: softmax, logsumexp, cross entropy and its gradient, dot."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Floats, KernelCase
from cortexmlx.metal.lab.judge.launches import F32, FLOATS, NAMES, Array, ResultArray, draw, i32, launch


def _cross_entropy(dtype: mx.Dtype, width: int, threads: int, gradient: bool) -> tuple[Floats, Floats]:
    rows = 3
    bits, x = draw(width, (rows, width), dtype, 4.0)
    targets = np.array([0, width - 1, -2], dtype=np.int32)
    at = targets % width
    largest = x.max(-1, keepdims=True)
    loss = np.log(np.exp(x - largest).sum(-1)) + largest[:, 0] - x[np.arange(rows), at]
    if not gradient:
        buffers: dict[int, Array | ResultArray] = {0: bits, 1: targets, 2: ResultArray((rows,), F32), 3: i32(width)}
        (y,) = launch(
            "cross_entropy.h", "cross_entropy", NAMES[dtype], buffers, groups=(rows, 1, 1), threadgroup=(threads, 1, 1)
        )
        return y, loss
    given, cotangent = loss.astype(np.float32), np.array([1.0, -0.5, 2.0], dtype=np.float32)
    (y,) = launch(
        "cross_entropy.h",
        "cross_entropy_vjp",
        NAMES[dtype],
        {0: bits, 1: targets, 2: given, 3: cotangent, 4: ResultArray((rows, width), dtype), 5: i32(width)},
        groups=(rows, 1, 1),
        threadgroup=(threads, 1, 1),
    )
    weights = np.exp(x - largest) / np.exp(x - largest).sum(-1, keepdims=True)
    return y, cotangent[:, None] * (weights - (np.arange(width) == at[:, None]))


def _row(header: str, function: str, dtype: mx.Dtype, rows: int, width: int, threads: int) -> tuple[Floats, Floats]:
    """Run softmax or logsumexp of each row."""
    bits, x = draw(width, (rows, width), dtype, 4.0)
    shifted = np.exp(x - x.max(-1, keepdims=True))
    sums = shifted.sum(-1)
    expected = shifted / sums[:, None] if header == "softmax.h" else np.log(sums) + x.max(-1)
    (y,) = launch(
        header,
        function,
        f"{NAMES[dtype]}, float",
        {0: bits, 1: ResultArray(expected.shape, dtype), 2: i32(width)},
        groups=(rows, 1, 1),
        threadgroup=(threads, 1, 1),
    )
    return y, expected


def _dot(dtype: mx.Dtype, size: int) -> tuple[Floats, Floats]:
    items, threads = 32, 256
    a_bits, a = draw(size, (size,), dtype)
    b_bits, b = draw(size + 1, (size,), dtype)
    groups = -(-size // (items * threads))
    (y,) = launch(
        "dot.h",
        "dot_product",
        f"{NAMES[dtype]}, {items}, {threads}, {threads // 32}",
        {0: a_bits, 1: b_bits, 2: ResultArray((groups,), F32), 3: i32(size)},
        groups=(groups, 1, 1),
        threadgroup=(threads, 1, 1),
    )
    return np.array([y.sum() / np.abs(a * b).sum()]), np.array([(a * b).sum() / np.abs(a * b).sum()])


def cases() -> Iterator[KernelCase]:
    """Yield widths that fill the threads' reads and widths that do not, with one and several simdgroups."""
    for dtype in FLOATS:
        name, tolerance = NAMES[dtype], TOLERANCE[dtype]
        for width, threads in ((100, 32), (1000, 256), (5001, 1024)):
            for gradient in (False, True):
                kernel = "cross_entropy_vjp" if gradient else "cross_entropy"
                run = partial(_cross_entropy, dtype, width, threads, gradient)
                yield KernelCase("MLX", f"{kernel} {name} {width}", run, tolerance * (8 if dtype == F32 else 1))
        looped = partial(_row, "logsumexp.h", "logsumexp_looped", dtype, 2, 5000, 1024)
        yield KernelCase("MLX", f"logsumexp_looped {name} 5000", looped, tolerance)
        for size in (8192, 9001):
            yield KernelCase("MLX", f"dot_product {name} {size}", partial(_dot, dtype, size), TOLERANCE[F32] * 4)


def softmax_cases() -> Iterator[KernelCase]:
    """Yield widths below and above what the threads of one group read at once."""
    for dtype in FLOATS:
        for header, function, width, threads in (
            ("softmax.h", "softmax_single_row", 100, 32),
            ("softmax.h", "softmax_single_row", 1000, 256),
            ("softmax.h", "softmax_looped", 5000, 1024),
            ("logsumexp.h", "logsumexp", 1000, 256),
        ):
            run = partial(_row, header, function, dtype, 3, width, threads)
            yield KernelCase("MLX", f"{function} {NAMES[dtype]} {width}", run, TOLERANCE[dtype])
