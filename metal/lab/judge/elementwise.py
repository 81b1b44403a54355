"""MLX's elementwise kernels: operations of one and two inputs, on contiguous and strided arrays; copies; selection."""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab.judge.cases import TOLERANCE, Floats, KernelCase
from cortexmlx.metal.lab.judge.launches import (
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
    rounded,
    strides_of,
    u32,
)

Function = Callable[..., Wide]


def _erf(x: Wide) -> Wide:
    """Return the error function by its power series, which converges for every x used here."""
    term, total = x.copy(), x.copy()
    for n in range(1, 60):
        term = term * -x * x / n
        total += term / (2 * n + 1)
    scaled: Wide = total * (2 / np.sqrt(np.pi))
    return scaled


def _erfinv(y: Wide) -> Wide:
    """Return the inverse error function, by bisection of `_erf`."""
    low, high = np.full_like(y, -4.0), np.full_like(y, 4.0)
    for _ in range(60):
        middle = (low + high) / 2
        above = _erf(middle) > y
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return low


UNARY: dict[str, tuple[Function, Callable[[Wide], Wide]]] = {
    "Abs": (np.abs, lambda x: x),
    "ArcCos": (np.arccos, np.tanh),
    "ArcCosh": (np.arccosh, lambda x: 1.5 + np.abs(x)),
    "ArcSin": (np.arcsin, np.tanh),
    "ArcSinh": (np.arcsinh, lambda x: x),
    "ArcTan": (np.arctan, lambda x: x),
    "ArcTanh": (np.arctanh, lambda x: np.tanh(x) * 0.9),
    "Ceil": (np.ceil, lambda x: x * 3),
    "Cos": (np.cos, lambda x: x),
    "Cosh": (np.cosh, lambda x: x),
    "Erf": (_erf, lambda x: x),
    "ErfInv": (_erfinv, lambda x: np.tanh(x) * 0.9),
    "Exp": (np.exp, lambda x: x),
    "Expm1": (np.expm1, lambda x: x),
    "Floor": (np.floor, lambda x: x * 3),
    "Log": (np.log, lambda x: np.abs(x) + 0.1),
    "Log2": (np.log2, lambda x: np.abs(x) + 0.1),
    "Log10": (np.log10, lambda x: np.abs(x) + 0.1),
    "Log1p": (np.log1p, np.abs),
    "Negative": (np.negative, lambda x: x),
    "Round": (np.round, lambda x: np.round(x * 4) / 2),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: x),
    "Sign": (np.sign, lambda x: np.round(x)),
    "Sin": (np.sin, lambda x: x),
    "Sinh": (np.sinh, lambda x: x),
    "Square": (np.square, lambda x: x),
    "Sqrt": (np.sqrt, np.abs),
    "Rsqrt": (lambda x: 1 / np.sqrt(x), lambda x: np.abs(x) + 0.1),
    "Tan": (np.tan, lambda x: np.tanh(x)),
    "Tanh": (np.tanh, lambda x: x),
}
"""The operation in NumPy, and a function that maps normal numbers to its domain."""

BINARY: dict[str, Function] = {
    "Add": np.add,
    "Subtract": np.subtract,
    "Multiply": np.multiply,
    "Divide": np.divide,
    "FloorDivide": lambda x, y: np.floor(x / y),
    "Remainder": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "LogAddExp": np.logaddexp,
    "Power": lambda x, y: np.power(np.abs(x), y),
    "ArcTan2": np.arctan2,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
}
INTEGER: dict[str, Function] = {
    "Add": np.add,
    "Multiply": np.multiply,
    "FloorDivide": lambda x, y: np.floor(x / y),
    "Remainder": np.mod,
    "BitwiseAnd": lambda x, y: x.astype(int) & y.astype(int),
    "BitwiseOr": lambda x, y: x.astype(int) | y.astype(int),
    "BitwiseXor": lambda x, y: x.astype(int) ^ y.astype(int),
    "LeftShift": lambda x, y: x.astype(int) << (y.astype(int)),
    "RightShift": lambda x, y: x.astype(int) >> (y.astype(int)),
    "Maximum": np.maximum,
}
COMPARISONS = ("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual")
SIZE = 101


def _unary(op: str, dtype: mx.Dtype, form: str) -> tuple[Floats, Floats]:
    function, domain = UNARY[op]
    shape = (3, 5, 7) if form == "g" else (SIZE,)
    bits, x = rounded(domain(np.random.default_rng(len(op)).standard_normal(shape)), dtype)
    name, per_thread = NAMES[dtype], 8 // dtype.size
    headers = ("unary_ops.h", "unary.h")
    if form == "g":  # the array transposed: [7, 5, 3] with strides 1, 7, 35
        strides, shape = [1, 7, 35], (7, 5, 3)
        buffers: dict[int, Array | ResultArray]
        buffers = {0: bits, 1: ResultArray(shape, dtype), 2: i32(*shape), 3: i64(*strides), 4: i32(3)}
        template = f"{name}, {name}, {op}, 2, int"
        (y,) = launch(headers, "unary_g", template, buffers, threads=(2, 5, 7), threadgroup=(2, 5, 7))
        return y, function(x.transpose(2, 1, 0))
    threads = -(-SIZE // per_thread)
    size = u32(SIZE) if form == "v" else i64(SIZE)
    (y,) = launch(
        headers,
        f"unary_{form}",
        f"{name}, {name}, {op}",
        {0: bits, 1: ResultArray((SIZE,), dtype), 2: size},
        threads=(threads, 1, 1),
        threadgroup=(32, 1, 1),
    )
    return y, np.asarray(function(x), dtype=np.float64)


def _pair(op: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> tuple[Array, Wide, Array, Wide]:
    a_bits, a = draw(7, shape, dtype)
    b_bits, b = draw(8, shape, dtype)
    if op in ("Divide", "FloorDivide", "Remainder", "LeftShift", "RightShift"):
        if dtype in FLOATS:
            b_bits, b = rounded(np.where(np.abs(b) < 0.3, 0.5, b), dtype)
        else:
            b = np.abs(b) % 5 + 1
            b_bits = b.astype(b_bits.dtype)
    if op == "Power":
        a_bits, a = rounded(np.abs(a) + 0.1, dtype)
    if op in COMPARISONS:
        b_bits.reshape(-1)[::3], b.reshape(-1)[::3] = a_bits.reshape(-1)[::3], a.reshape(-1)[::3]
    return a_bits, a, b_bits, b


def _binary(op: str, dtype: mx.Dtype, form: str) -> tuple[Floats, Floats]:
    function = (BINARY if dtype in FLOATS else INTEGER)[op]
    out = mx.bool_ if op in COMPARISONS else dtype
    template, per_thread = f"{NAMES[dtype]}, {NAMES[out]}, {op}", 8 // dtype.size
    headers = ("binary_ops.h", "binary.h")
    if form.startswith("g"):
        count = {"g_nd1": 1, "g_nd2": 2, "g_nd3": 3, "g": 4}[form]
        shape = (2, 3, 4, 5)[-count:]
        a_bits, a, b_bits, b = _pair(op, dtype, shape)
        flipped = tuple(reversed(shape))  # b is stored transposed
        b_strides = list(reversed(strides_of(flipped)))
        b_bits, b = b_bits.reshape(flipped), b.reshape(flipped)
        x, y_, z = (*reversed(shape), 1, 1)[:3]
        grid = (x, y_, z)
        buffers: dict[int, Array | ResultArray] = {0: a_bits, 1: b_bits, 2: ResultArray(shape, out)}
        if form == "g":
            buffers |= {3: i32(*shape), 4: i64(*strides_of(shape)), 5: i64(*b_strides), 6: i32(4)}
            template, grid = template + ", 2, int", (3, 4, 6)
        else:
            buffers |= {3: i64(*strides_of(shape)), 4: i64(*b_strides)}
        (y,) = launch(headers, f"binary_{form}", template, buffers, threads=grid, threadgroup=(4, 2, 2))
        return y, np.asarray(function(a, b.transpose()), dtype=np.float64)
    a_bits, a, b_bits, b = _pair(op, dtype, (SIZE,))
    kind = form[:2]
    a, b = (a[:1] if kind[0] == "s" else a), (b[:1] if kind[1] == "s" else b)
    result = 1 if kind == "ss" else SIZE
    buffers = {0: a_bits[: a.size], 1: b_bits[: b.size], 2: ResultArray((result,), out)}
    if kind != "ss":
        buffers[3] = i64(SIZE) if form.endswith("2") else u32(SIZE)
    threads = 1 if kind == "ss" else -(-SIZE // per_thread)
    (y,) = launch(headers, f"binary_{form}", template, buffers, threads=(threads, 1, 1), threadgroup=(32, 1, 1))
    return y, np.asarray(function(a, b), dtype=np.float64)


def _copy(source: mx.Dtype, target: mx.Dtype, form: str) -> tuple[Floats, Floats]:
    """Run a converting copy: of one number, of an array, or into or out of a strided array."""
    template, per_thread = f"{NAMES[source]}, {NAMES[target]}", 8 // target.size
    bits, x = draw(9, (4, 6), source, 3.0)
    expected = x if target in FLOATS else np.trunc(x)
    if target in FLOATS:
        expected = rounded(x, target)[1]
    if form in ("s", "v", "s2", "v2"):
        size = i64(24) if form.endswith("2") else u32(24)
        given = bits[:1, :1] if form.startswith("s") else bits
        buffers: dict[int, Array | ResultArray] = {0: given, 1: ResultArray((4, 6), target), 2: size}
        threads = (-(-24 // per_thread), 1, 1)
        expected = np.broadcast_to(expected[0, 0], (4, 6)) if form.startswith("s") else expected
    elif form == "g_nd2":  # the transpose
        buffers = {0: bits, 1: ResultArray((6, 4), target), 3: i64(1, 6)}
        threads, expected = (4, 6, 1), expected.T
    elif form == "gg_nd2":  # into the transpose
        buffers = {0: bits, 1: ResultArray((6, 4), target), 3: i64(6, 1), 4: i64(1, 4)}
        threads, expected = (6, 4, 1), expected.T
    else:
        shape = i32(6, 4)
        buffers = {0: bits, 1: ResultArray((6, 4), target), 2: shape, 3: i64(1, 6), 5: i32(2)}
        threads, template, expected = (2, 6, 1), template + ", 2, int", expected.T
        if form.startswith("gg"):
            buffers[4] = i64(4, 1)
        if form == "gg_dynamic":
            buffers |= {6: i64(0), 7: i64(0)}
    (y,) = launch("copy.h", f"copy_{form}", template, buffers, threads=threads, threadgroup=(8, 2, 1))
    return y, np.asarray(expected, dtype=np.float64)


def _select(dtype: mx.Dtype, form: str) -> tuple[Floats, Floats]:
    size = 60
    conditions = np.random.default_rng(1).random((3, 4, 5)) < 0.5
    a_bits, a = draw(10, (3, 4, 5), dtype)
    b_bits, b = draw(11, (3, 4, 5), dtype)
    buffers: dict[int, Array | ResultArray] = {0: conditions, 1: a_bits, 2: b_bits, 3: ResultArray((3, 4, 5), dtype)}
    template, per_thread = f"{NAMES[dtype]}, Select", 8 // dtype.size
    strides = i64(20, 5, 1)
    if form in ("v", "v2"):
        buffers[4] = u32(size) if form == "v" else i64(size)
        template, threads = template + ", false, false", (-(-size // per_thread), 1, 1)
    elif form == "g_nd3":
        buffers |= {4: strides, 5: strides, 6: strides}
        threads = (5, 4, 3)
    else:
        buffers |= {4: i32(3, 4, 5), 5: strides, 6: strides, 7: strides, 8: i32(3)}
        template, threads = template + ", 2, int", (3, 4, 3)
    (y,) = launch(
        ("ternary_ops.h", "ternary.h"), f"ternary_{form}", template, buffers, threads=threads, threadgroup=(8, 2, 2)
    )
    return y, np.where(conditions, a, b)


def _arange() -> tuple[Floats, Floats]:
    buffers: dict[int, Array | ResultArray] = {0: f32(0.5), 1: f32(0.25), 2: ResultArray((70,), F32)}
    (y,) = launch("arange.h", "arange", "float", buffers, threads=(70, 1, 1), threadgroup=(32, 1, 1))
    return y, 0.5 + 0.25 * np.arange(70)


def _divmod(dtype: mx.Dtype) -> tuple[Floats, Floats]:
    a_bits, a, b_bits, b = _pair("Divide", dtype, (SIZE,))
    name = NAMES[dtype]
    quotient, rest = launch(
        ("binary_ops.h", "binary_two.h"),
        "binary_vv",
        f"{name}, {name}, DivMod",
        {0: a_bits, 1: b_bits, 2: ResultArray((SIZE,), dtype), 3: ResultArray((SIZE,), dtype), 4: u32(SIZE)},
        threads=(-(-SIZE // (8 // dtype.size)), 1, 1),
        threadgroup=(32, 1, 1),
    )
    return np.stack([quotient, rest]), np.stack([np.floor(a / b), np.mod(a, b)])


def cases() -> Iterator[KernelCase]:
    """Yield every operation on contiguous float32, a few in other shapes and dtypes, copies and selections."""
    for op in UNARY:
        yield KernelCase("MLX", f"unary_v {op} float", partial(_unary, op, F32, "v"), TOLERANCE[F32] * 4)
    for dtype in FLOATS:
        for form in ("v2", "g"):
            run = partial(_unary, "Exp", dtype, form)
            yield KernelCase("MLX", f"unary_{form} Exp {NAMES[dtype]}", run, TOLERANCE[dtype])
    for op in BINARY:
        yield KernelCase("MLX", f"binary_vv {op} float", partial(_binary, op, F32, "vv"), TOLERANCE[F32] * 2)
    for op in INTEGER:
        yield KernelCase("MLX", f"binary_vv {op} int32_t", partial(_binary, op, mx.int32, "vv"), 0.0)
    for form in ("ss", "sv", "vs", "sv2", "vs2", "vv2", "g_nd1", "g_nd2", "g_nd3", "g"):
        for dtype in FLOATS:
            run = partial(_binary, "Subtract", dtype, form)
            yield KernelCase("MLX", f"binary_{form} Subtract {NAMES[dtype]}", run, TOLERANCE[dtype])
    for form in ("s", "v", "s2", "v2", "g_nd2", "gg_nd2", "g", "gg", "gg_dynamic"):
        for source, target in ((F32, mx.bfloat16), (mx.bfloat16, F32), (F32, mx.int32), (mx.int32, mx.float16)):
            run = partial(_copy, source, target, form)
            yield KernelCase("MLX", f"copy_{form} {NAMES[source]} to {NAMES[target]}", run, 0.0)
    for form in ("v", "v2", "g_nd3", "g"):
        yield KernelCase("MLX", f"ternary_{form} Select float", partial(_select, F32, form), 0.0)
    yield KernelCase("MLX", "arange float", _arange, 0.0)
    for dtype in (F32, mx.int32):
        yield KernelCase("MLX", f"binary_two_vv DivMod {NAMES[dtype]}", partial(_divmod, dtype), TOLERANCE[F32])
