"""MLX's scans: along contiguous rows and down columns, inclusive and exclusive, forwards and backwards."""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Defect, Floats, KernelCase
from cortexmlx.metal.lab.judge.launches import BF16, F16, F32, NAMES, ResultArray, Wide, draw, i64, launch
from cortexmlx.metal.lab.sim.report import Fault

OPS: dict[str, tuple[str, Callable[..., Wide], float]] = {
    "sum": ("CumSum", np.add.accumulate, 0.0),
    "prod": ("CumProd", np.multiply.accumulate, 1.0),
    "max": ("CumMax", np.maximum.accumulate, -np.inf),
    "min": ("CumMin", np.minimum.accumulate, np.inf),
    "logaddexp": ("CumLogaddexp", np.logaddexp.accumulate, -np.inf),
}
"""MLX's functor, NumPy's scan, and the first value of an exclusive scan."""


def _expected(op: str, x: Wide, inclusive: bool, reverse: bool) -> Wide:
    """Return the scan along axis 1."""
    _, accumulate, start = OPS[op]
    x = x[:, ::-1] if reverse else x
    done = accumulate(x, axis=1)
    if not inclusive:
        done = np.concatenate([np.full_like(x[:, :1], start), done[:, :-1]], axis=1)
    return done[:, ::-1] if reverse else done


def _finite(y: Wide) -> Wide:
    """Replace the ends of the dtype by 0: they stand for infinity where nothing has been scanned."""
    return np.where(np.abs(y) > 1e30, 0.0, y)


def _scan(
    op: str, dtype: mx.Dtype, shape: tuple[int, int, int], inclusive: bool, reverse: bool, threads: int
) -> tuple[Floats, Floats]:
    """Run a scan of the N axis of [A, N, C]. C = 1 takes the contiguous kernel."""
    first, size, columns = shape
    bits, x = draw(size, shape, dtype, 0.3 if op == "prod" else 1.0)
    functor, *_ = OPS[op]
    name = NAMES[dtype]
    reads = 4 if dtype.size <= 4 else 2
    template = f"{name}, {name}, {functor}<{name}>, {reads}, {str(inclusive).lower()}, {str(reverse).lower()}"
    if columns == 1:
        (y,) = launch(
            "scan.h",
            "contiguous_scan",
            template,
            {0: bits, 1: ResultArray(shape, dtype), 2: i64(size)},
            groups=(1, first, 1),
            threadgroup=(threads, 1, 1),
        )
    else:
        blocks = -(-columns // 32)
        (y,) = launch(
            "scan.h",
            "strided_scan",
            template,
            {0: bits, 1: ResultArray(shape, dtype), 2: i64(size), 3: i64(columns), 4: i64(blocks)},
            groups=(1, first * blocks, 1),
            threadgroup=(32 // reads * 32, 1, 1),
        )
    expected = _expected(op, x, inclusive, reverse)
    if dtype not in TOLERANCE:  # an exclusive maximum of integers begins with the smallest of them
        return np.where(np.abs(y) > 1e6, 0.0, y), np.where(np.isinf(expected), 0.0, expected)
    return _finite(y), np.where(np.isinf(expected), 0.0, expected)


_UNUSED_LANES = Defect(
    Fault.UNINITIALISED,
    "MLX's contiguous_scan scans 32 sums of simdgroups where fewer have been written: the lanes beyond them read what "
    "nobody wrote, and no lane that counts depends on it",
)


def cases() -> Iterator[KernelCase]:
    """Yield every operation in every direction, with lengths below and above what a threadgroup takes at a time."""
    for op, dtypes in (
        ("sum", (F32, F16, mx.int32, mx.int64)),
        ("prod", (F32,)),
        ("max", (F32, BF16, mx.int32)),
        ("min", (F32,)),
        ("logaddexp", (F32,)),
    ):
        for dtype in dtypes:
            tolerance = TOLERANCE.get(dtype, 0.0) * (0 if op in ("max", "min") else 8)
            for inclusive in (True, False):
                for reverse in (False, True):
                    for shape, threads in (((3, 50, 1), 32), ((2, 700, 1), 192), ((1, 1100, 1), 96), ((2, 70, 40), 0)):
                        kernel = "contiguous_scan" if shape[2] == 1 else "strided_scan"
                        title = f"{kernel} {op} {NAMES[dtype]} {'x'.join(map(str, shape))}"
                        title += f"{'' if inclusive else ' exclusive'}{' reverse' if reverse else ''}"
                        run = partial(_scan, op, dtype, shape, inclusive, reverse, threads)
                        unused = _UNUSED_LANES if shape[2] == 1 else None
                        yield KernelCase("MLX", title, run, tolerance, defect=unused)
