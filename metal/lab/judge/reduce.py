"""MLX's reductions: of whole arrays, of rows (small, simple, looped) and of columns (small, long, looped, in two
passes).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Defect, Floats, KernelCase
from cortexmlx.metal.lab.judge.launches import (
    BF16,
    F16,
    F32,
    NAMES,
    Array,
    ResultArray,
    Wide,
    draw,
    i32,
    i64,
    launch,
    strides_of,
)
from cortexmlx.metal.lab.sim.kernel import numpy_type
from cortexmlx.metal.lab.sim.report import Fault

HEADERS = ("reduce_utils.h", "reduce.h")


@dataclass(frozen=True)
class Op:
    """A reduction: MLX's functor and the NumPy function."""

    functor: str
    numpy: Callable[..., Wide]


OPS = {
    "sum": Op("Sum", np.sum),
    "prod": Op("Prod", np.prod),
    "min": Op("Min", np.min),
    "max": Op("Max", np.max),
    "and": Op("And", np.all),
    "or": Op("Or", np.any),
}


def _inputs(op: str, shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[Array, Wide]:
    if op == "prod":  # plus or minus one: the product is exact whatever the order
        sign = np.random.default_rng(3).integers(0, 2, shape) * 2 - 1
        bits = np.array(mx.array(sign.astype(np.float32)).astype(dtype).view(mx.uint16) if dtype == BF16 else sign)
        return (bits if dtype == BF16 else sign.astype(numpy_type(dtype))), sign.astype(np.float64)
    bits, x = draw(sum(shape), shape, dtype)
    if op in ("and", "or"):  # one row of each kind
        bits[...] = op == "and"
        bits.reshape(-1)[bits.size // 2] = op == "or"
        x = bits.astype(np.float64)
    return bits, x


def _types(op: str, dtype: mx.Dtype) -> tuple[str, mx.Dtype]:
    """Return the template's first three arguments and the dtype of the result."""
    out = mx.bool_ if op in ("and", "or") else mx.int32 if dtype == mx.int8 and op in ("sum", "prod") else dtype
    return f"{NAMES[dtype]}, {NAMES[out]}, {OPS[op].functor}<{NAMES[out]}>", out


def _all(op: str, dtype: mx.Dtype, size: int, rows: int) -> tuple[Floats, Floats]:
    bits, x = _inputs(op, (size,), dtype)
    types, out = _types(op, dtype)
    row = -(-size // rows)
    threads = min(-(-row // 4) + 31, 1024) // 32 * 32
    (y,) = launch(
        HEADERS,
        "all_reduce",
        types,
        {0: bits, 1: ResultArray((rows,), out), 2: i64(size), 3: i64(row)},
        groups=(1, rows, 1),
        threadgroup=(threads, 1, 1),
    )
    pieces = [x[at * row : (at + 1) * row] for at in range(rows)]
    return y, np.array([OPS[op].numpy(piece) for piece in pieces], dtype=np.float64)


def _row_arguments(shape: tuple[int, ...], axes: tuple[int, ...]) -> dict[int, Array]:
    """Return buffers 2 to 9 of the general row reductions of a row-major array. The last axis is reduced."""
    strides = strides_of(shape)
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    outer = [axis for axis in axes if axis != len(shape) - 1]
    return {
        2: i64(shape[-1]),
        3: i64(int(np.prod([shape[axis] for axis in outer]))),
        4: i32(*[shape[axis] for axis in kept] or [0]),
        5: i64(*[strides[axis] for axis in kept] or [0]),
        6: i32(len(kept)),
        7: i32(*[shape[axis] for axis in outer] or [0]),
        8: i64(*[strides[axis] for axis in outer] or [0]),
        9: i32(len(outer)),
    }


def _dims(count: int) -> int:
    return count if count <= 2 else 5


def _rows(
    kind: str, op: str, dtype: mx.Dtype, shape: tuple[int, ...], axes: tuple[int, ...], threads: int
) -> tuple[Floats, Floats]:
    bits, x = _inputs(op, shape, dtype)
    types, out = _types(op, dtype)
    kept = tuple(n for axis, n in enumerate(shape) if axis not in axes)
    count = int(np.prod(kept, dtype=np.int64))
    arguments = _row_arguments(shape, axes)
    outer = int(arguments[3][0])
    expected = np.asarray(OPS[op].numpy(x, axis=axes), dtype=np.float64)
    buffers: dict[int, Array | ResultArray] = {0: bits, 1: ResultArray(kept, out)}
    if kind == "simple":
        (y,) = launch(
            HEADERS,
            "row_reduce_simple",
            types,
            buffers | {2: i64(shape[-1]), 3: i64(count)},
            groups=(1, -(-count // 4), 1),
            threadgroup=(threads, 1, 1),
        )
        return y, expected
    template = f"{types}, int, {_dims(max(len(axes) - 1, 1))}"
    alone = (outer < 32 and shape[-1] <= 8) or outer <= 8
    grid = (count, 1, 1) if kind == "small" and alone else (threads, count, 1)
    group = (min(count, 1024), 1, 1) if kind == "small" and alone else (threads, 1, 1)
    (y,) = launch(HEADERS, f"row_reduce_{kind}", template, buffers | dict(arguments), threads=grid, threadgroup=group)
    return y, expected


def _columns(kind: str, op: str, dtype: mx.Dtype, shape: tuple[int, int, int], outer: bool) -> tuple[Floats, Floats]:
    """Run a column reduction of [A, R, C]. It reduces axis 1, with `outer` also axis 0, and keeps the C columns."""
    bits, x = _inputs(op, shape, dtype)
    types, out = _types(op, dtype)
    first, rows, columns = shape
    kept = 1 if outer else first
    reduce_shape = [first, rows] if outer else [rows]
    reduce_strides = [rows * columns, columns] if outer else [columns]
    others = first if outer else 1
    arguments: dict[int, Array | ResultArray] = {
        2: i64(rows),
        3: i64(columns),
        4: i32(0) if outer else i32(first),
        5: i64(0) if outer else i64(rows * columns),
        6: i32(0 if outer else 1),
        7: i32(*reduce_shape),
        8: i64(*reduce_strides),
        9: i32(len(reduce_shape)),
        10: i64(others),
    }
    expected = np.asarray(OPS[op].numpy(x, axis=(0, 1) if outer else 1), dtype=np.float64).reshape(kept, columns)
    template = f"{types}, int, {len(reduce_shape)}"
    if kind == "small":
        blocks = -(-columns // 4)
        wide = min(blocks, 32)
        (y,) = launch(
            HEADERS,
            "col_reduce_small",
            template,
            {0: bits, 1: ResultArray((kept, columns), out), **arguments},
            groups=(-(-blocks // wide), kept, 1),
            threadgroup=(wide, min(8, rows * others), 1),
        )
        return y, expected
    if kind == "looped":
        (y,) = launch(
            HEADERS,
            "col_reduce_looped",
            template + ", 32, 32",
            {0: bits, 1: ResultArray((kept, columns), out), **arguments, 11: i64(0)},
            groups=(-(-columns // 32), kept, 1),
            threadgroup=(256, 1, 1),
        )
        return y, expected
    partial_shape = (32, kept, columns)
    if kind == "longcolumn":
        tall = min(32, -(-rows * others // 32))
        last, groups, group = {11: i64(kept * columns)}, (kept, 1, 32), (columns, tall, 1)
    else:
        template += ", 32, 32"
        last, groups, group = {11: i64(0), 12: i64(kept)}, (-(-columns // 32), kept * 32, 1), (256, 1, 1)
    (partials,) = launch(
        HEADERS,
        f"col_reduce_{kind}",
        template,
        {0: bits, 1: ResultArray(partial_shape, out), **arguments, **last},
        groups=groups,
        threadgroup=group,
    )
    return np.asarray(OPS[op].numpy(partials, axis=0), dtype=np.float64), expected


_LEFT_EARLY = Defect(
    Fault.BARRIER_DIVERGENCE,
    "MLX's col_reduce_small returns beyond the last column before a barrier that the rest of the threadgroup waits at, "
    "which the language does not define (MSL 6.9.1)",
    stops=True,
)


def cases() -> Iterator[KernelCase]:
    """Yield every operation, with the dtypes that have their own paths and sizes near the width of a group."""
    several = (("sum", F32), ("sum", F16), ("sum", BF16), ("sum", mx.int8), ("prod", F32), ("min", F32), ("max", BF16))
    for op, dtype in (*several, ("max", mx.int32), ("min", mx.int64), ("and", mx.bool_), ("or", mx.bool_)):
        tolerance = TOLERANCE.get(dtype, 0.0) if op == "sum" else 0.0
        # The kernel adds in the dtype, so every level of the sum rounds.
        tolerance *= 4
        label = f"{op} {NAMES[dtype]}"
        for size, rows in ((100, 1), (4000, 1), (5000, 7)):
            yield KernelCase(
                "MLX", f"all_reduce {label} {size} in {rows}", partial(_all, op, dtype, size, rows), tolerance
            )
        for kind, shape, axes, threads in (
            ("small", (3, 5, 7), (2,), 32),
            ("small", (40, 3, 20), (0, 2), 32),
            ("small", (2, 3, 4, 2, 5), (0, 2, 4), 32),
            ("simple", (37, 130), (1,), 32),
            ("simple", (33, 1100), (1,), 288),
            ("looped", (3, 2, 700), (0, 2), 128),
            ("looped", (2, 1030), (1,), 288),
        ):
            run = partial(_rows, kind, op, dtype, shape, axes, threads)
            yield KernelCase(
                "MLX", f"row_reduce_{kind} {label} {'x'.join(map(str, shape))} over {axes}", run, tolerance
            )
        for kind, shape3, outer in (
            ("small", (3, 9, 70), False),
            ("small", (3, 5, 69), True),
            ("small", (3, 5, 130), True),
            ("longcolumn", (2, 1025, 5), False),
            ("longcolumn", (3, 400, 7), True),
            ("looped", (2, 40, 70), False),
            ("looped", (3, 50, 33), True),
            ("2pass", (2, 300, 70), False),
            ("2pass", (3, 100, 31), True),
        ):
            run = partial(_columns, kind, op, dtype, shape3, outer)
            how = "both" if outer else "the middle"
            title = f"col_reduce_{kind} {label} {'x'.join(map(str, shape3))} over {how}"
            beyond = kind == "small" and -(-shape3[2] // 4) > 32
            yield KernelCase("MLX", title, run, tolerance, defect=_LEFT_EARLY if beyond else None)
