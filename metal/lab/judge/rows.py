"""MLX's kernels for rows of logits: softmax and logsumexp."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Floats, KernelCase
from cortexmlx.metal.lab.judge.launches import FLOATS, NAMES, ResultArray, draw, i32, launch


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


def softmax_cases() -> Iterator[KernelCase]:
    """Yield widths below and above what the threads of one group read at once."""
    for dtype in FLOATS:
        for header, function, width, threads in (
            ("softmax.h", "softmax_single_row", 100, 32),
            ("softmax.h", "softmax_single_row", 1000, 256),
            ("softmax.h", "softmax_looped", 5000, 1024),
            ("logsumexp.h", "logsumexp", 1000, 256),
            ("logsumexp.h", "logsumexp_looped", 5000, 1024),
        ):
            run = partial(_row, header, function, dtype, 3, width, threads)
            yield KernelCase("MLX", f"{function} {NAMES[dtype]} {width}", run, TOLERANCE[dtype])
