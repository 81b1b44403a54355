"""MLX's row kernels: softmax in one go and in a loop, and logsumexp."""

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from ..host import HostKernel, Output
from .cases import TOLERANCE, Case, Floats
from .reference import METAL_NAMES, from_bits, rounded


def _rows(header: str, function: str, dtype: mx.Dtype, width: int, threads: int) -> tuple[Floats, Floats]:
    rows = 3
    bits, x = rounded(np.random.default_rng(width).standard_normal((rows, width)) * 4, dtype)
    shifted = np.exp(x - x.max(-1, keepdims=True))
    if function == "logsumexp":
        expected = np.log(shifted.sum(-1)) + x.max(-1)
    else:
        expected = shifted / shifted.sum(-1, keepdims=True)
    kernel = HostKernel((header,), function, f"{METAL_NAMES[dtype]}, float", {})
    result = Output(expected.size * bits.itemsize, bits.itemsize)
    done = kernel({0: bits, 1: result, 2: np.array([width], dtype=np.int32)}, (rows, 1, 1), (threads, 1, 1))
    return from_bits(done.outputs[0], expected.shape, dtype), expected


def cases() -> Iterator[Case]:
    """Widths below, at and above what the threads of one group read at once."""
    for dtype, name in METAL_NAMES.items():
        for header, function, width, threads in (
            ("softmax.h", "softmax_single_row", 100, 32),
            ("softmax.h", "softmax_single_row", 1000, 256),
            ("softmax.h", "softmax_looped", 5000, 1024),
            ("logsumexp.h", "logsumexp", 1000, 256),
        ):
            run = partial(_rows, header, function, dtype, width, threads)
            yield Case("MLX", f"{function} {name} {width}", run, TOLERANCE[dtype])
