"""The Metal library of the simulator against NumPy: math, vectors, simdgroup operations, matrices, atomics."""

import math

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
RNG = np.random.default_rng(0)
POSITIVE = RNG.uniform(0.1, 3.0, 64).astype(np.float32)
SIGNED = RNG.uniform(-3.0, 3.0, 64).astype(np.float32)
UNIT = RNG.uniform(-0.99, 0.99, 64).astype(np.float32)

UNARY = {
    "exp": (np.exp, SIGNED),
    "exp2": (np.exp2, SIGNED),
    "exp10": (lambda x: np.power(10.0, x), SIGNED),
    "log": (np.log, POSITIVE),
    "log2": (np.log2, POSITIVE),
    "log10": (np.log10, POSITIVE),
    "sqrt": (np.sqrt, POSITIVE),
    "rsqrt": (lambda x: 1 / np.sqrt(x), POSITIVE),
    "sin": (np.sin, SIGNED),
    "cos": (np.cos, SIGNED),
    "tan": (np.tan, UNIT),
    "sinpi": (lambda x: np.sin(np.pi * x), SIGNED),
    "cospi": (lambda x: np.cos(np.pi * x), SIGNED),
    "asin": (np.arcsin, UNIT),
    "acos": (np.arccos, UNIT),
    "atan": (np.arctan, SIGNED),
    "sinh": (np.sinh, SIGNED),
    "cosh": (np.cosh, SIGNED),
    "tanh": (np.tanh, SIGNED),
    "asinh": (np.arcsinh, SIGNED),
    "acosh": (np.arccosh, POSITIVE + 1),
    "atanh": (np.arctanh, UNIT),
    "floor": (np.floor, SIGNED),
    "ceil": (np.ceil, SIGNED),
    "trunc": (np.trunc, SIGNED),
    "rint": (np.rint, np.arange(-16, 16, 0.5, dtype=np.float32)),
    "round": (lambda x: np.trunc(x + np.copysign(0.5, x)), np.arange(-16, 16, 0.5, dtype=np.float32)),
    "fabs": (np.abs, SIGNED),
    "abs": (np.abs, SIGNED),
    "fract": (lambda x: x - np.floor(x), SIGNED),
    "sign": (np.sign, SIGNED),
    "saturate": (lambda x: np.clip(x, 0, 1), SIGNED),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_unary_functions(dtype):
    tolerance = {mx.float32: 3e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]
    rows = []
    for name, (_, values) in UNARY.items():
        rows.append((name, mx.array(values).astype(dtype)))
    for spelling in ("metal::", "metal::fast::", "metal::precise::", "") if dtype == mx.float32 else ("",):
        body = "".join(
            f"y[i + {64 * n}] = T({spelling if name != 'sign' else 'metal::'}{name}(x[i + {64 * n}]));\n"
            for n, (name, _) in enumerate(rows)
        )
        y, _ = launch(I + body, x=mx.concatenate([v for _, v in rows]), dtype=dtype, outputs=64 * len(rows))
        got = np.array(y.astype(mx.float32)).reshape(len(rows), 64)
        for n, (name, values) in enumerate(rows):
            exact = UNARY[name][0](np.array(values.astype(mx.float32)).astype(np.float64))
            np.testing.assert_allclose(got[n], exact, rtol=tolerance, atol=tolerance, err_msg=name)


EXPRESSIONS = {
    # what the kernel computes from x (0, 1, 2, ... 63 as float) -> the same in Python
    "pow(v, 1.5f)": lambda v: v**1.5,
    "powr(v, 0.5f)": lambda v: v**0.5,
    "fmod(v, 2.5f)": lambda v: math.fmod(v, 2.5),
    "atan2(v, 2.0f)": lambda v: math.atan2(v, 2),
    "copysign(v, -1.0f)": lambda v: -v,
    "fma(v, 3.0f, 1.0f)": lambda v: 3 * v + 1,
    "mix(1.0f, 3.0f, v)": lambda v: 1 + 2 * v,
    "clamp(v, 3.0f, 9.0f)": lambda v: min(max(v, 3), 9),
    "step(4.0f, v)": lambda v: float(v >= 4),
    "smoothstep(0.0f, 63.0f, v)": lambda v: (v / 63) ** 2 * (3 - 2 * v / 63),
    "fmax(v, NAN)": lambda v: v,
    "max(v, 7.0f)": lambda v: max(v, 7),
    "min3(v, 9.0f, 5.0f)": lambda v: min(v, 9, 5),
    "median3(v, 9.0f, 5.0f)": lambda v: sorted((v, 9, 5))[1],
    "select(v, -v, v > 5)": lambda v: -v if v > 5 else v,
    "ldexp(v, 3)": lambda v: v * 8,
    "fdim(v, 10.0f)": lambda v: max(v - 10, 0),
    "divide(v, 4.0f)": lambda v: v / 4,
    "float(isnan(v / 0.0f - v / 0.0f))": lambda v: 1.0,
    "float(isinf(v / 0.0f))": lambda v: float(v != 0),
    "float(popcount(uint(v)))": lambda v: int(v).bit_count(),
    "float(clz(uint(v)))": lambda v: 32 - int(v).bit_length(),
    "float(clz(uchar(v)))": lambda v: 8 - int(v).bit_length(),
    "float(ctz(uint(v) | 64u))": lambda v: ((int(v) | 64) & -(int(v) | 64)).bit_length() - 1,
    "float(reverse_bits(uint(v)) >> 26)": lambda v: int(f"{int(v):06b}"[::-1], 2),
    "float(extract_bits(uint(v), 1, 3))": lambda v: int(v) >> 1 & 7,
    "float(insert_bits(uint(v), 1u, 4, 2))": lambda v: (int(v) & ~48) | 16,
    "float(rotate(uint(v), 31u) >> 1)": lambda v: ((int(v) >> 1) | ((int(v) & 1) << 31)) >> 1,
    "float(abs(int(v) - 9))": lambda v: abs(v - 9),
    "float(as_type<uint>(v) >> 23)": lambda v: np.float32(v).view(np.uint32) >> 23,
    "as_type<float>(as_type<uint>(v) ^ 0x80000000u)": lambda v: -v,
    "float(as_type<ushort>(half(v)))": lambda v: np.float16(v).view(np.uint16),
    "dot(float3(v, 1, 2), float3(2, v, 1))": lambda v: 3 * v + 2,
    "length(float2(v, v))": lambda v: v * 2**0.5,
    "cross(float3(v, 1, 0), float3(0, 1, 0)).z": lambda v: v,
    "float4(float2(v, 1), 2, 3).wzyx.w": lambda v: v,
    "float4(1, float2(v, 2), 3).y": lambda v: v,
    "float4(v).z": lambda v: v,
    "vec<float, 4>(1, v, 2, 3)[1]": lambda v: v,
    "float(int4(float4(v + 0.75f)).x)": lambda v: v,
    "float(half2(float2(v, 1)).x)": lambda v: v,
    "float4(half4(v, 1, 2, 3)).x": lambda v: v,
    "max(float2(v, 1), float2(3, 3)).x": lambda v: max(v, 3),
    "abs(float2(-v, 1)).x": lambda v: v,
    "exp(float2(v / 64, 1)).x": lambda v: math.exp(v / 64),
    "clamp(float2(v, 1), 2.0f, 5.0f).x": lambda v: min(max(v, 2), 5),
    "float(all(float2(v, 1) >= 0.0f))": lambda v: 1.0,
    "float(any(float2(v, 1) > 40.0f))": lambda v: float(v > 40),
    "select(float2(1, 2), float2(v, v), float2(v, v) > 5.0f).y": lambda v: v if v > 5 else 2,
    "float(sizeof(float3) + sizeof(bool4))": lambda v: 16 + 4,
    "1.0 / 3.0 * 3.0 == 1.0 ? v : v": lambda v: v,
    "float(sizeof(1.0))": lambda v: 4,
    "float(sizeof(half(1) * half(1)) + sizeof(long) + sizeof(size_t) + sizeof(short))": lambda v: 2 + 8 + 8 + 2,
    "numeric_limits<float>::infinity() > v ? v : 0.0f": lambda v: v,
    "float(numeric_limits<short>::max()) + float(numeric_limits<uchar>::min())": lambda v: 32767,
    "float(Limits<half>::max == half(INFINITY)) + v": lambda v: v + 1,
    "ceildiv(int(v), 8)": lambda v: -(-int(v) // 8),
}


def test_expressions():
    body = "float v = x[i];\n" + "".join(f"y[i + {64 * n}] = {e};\n" for n, e in enumerate(EXPRESSIONS))
    y, _ = launch(I + body, outputs=64 * len(EXPRESSIONS))
    got = np.array(y).reshape(-1, 64)
    for n, (text, value) in enumerate(EXPRESSIONS.items()):
        expected = [float(value(float(v))) for v in range(64)]
        np.testing.assert_allclose(got[n], expected, rtol=2e-6, atol=2e-6, err_msg=text)


def test_a_vector_cast_converts_values_and_does_not_reinterpret_bits():
    y, _ = launch(
        I + "int4 k = int4(int(i)); float4 f = (float4)k; float4 g = static_cast<float4>(k); y[i] = f.x + g.y;"
    )
    np.testing.assert_array_equal(np.array(y), 2 * np.arange(64))


def test_names_for_vector_types_construct_and_convert_like_the_types():
    types = "using V = vec<T, 4>; typedef float2 P; "
    y, _ = launch(I + types + "V v = V(i, 1, 2, 3); P p = P(v.xy); V w = V(int4(i)); y[i] = p.x + w.z;")
    np.testing.assert_array_equal(np.array(y), 2 * np.arange(64))


def test_swizzles_can_be_assigned():
    y, _ = launch(I + "float4 v = 0; v.xz = float2(i, 1); v.w += v.x; v[1] = 5; y[i] = v.w + v.y + v.z;")
    np.testing.assert_array_equal(np.array(y), np.arange(64) + 6)


def test_half_arithmetic_rounds_after_every_operation():
    values = RNG.uniform(-4, 4, 64).astype(np.float16)
    y, _ = launch(I + "T a = x[i]; y[i] = a * a * a + a;", x=mx.array(values), dtype=mx.float16)
    np.testing.assert_array_equal(np.array(y), values * values * values + values)


def test_bfloat_arithmetic_rounds_after_every_operation():
    x = mx.array(RNG.uniform(-4, 4, 64).astype(np.float32)).astype(mx.bfloat16)
    y, _ = launch(I + "T a = x[i]; y[i] = a * a * a + a;", x=x, dtype=mx.bfloat16)
    assert mx.array_equal(y, x * x * x + x)


def test_half_and_bfloat_convert_into_each_other_when_asked():
    y, _ = launch(
        I + "half h = half(x[i]); y[i] = bfloat(h) + static_cast<T>(static_cast<half>(x[i]));", dtype=mx.bfloat16
    )
    assert y.tolist() == [2 * i for i in range(64)]


LANES = np.arange(64) % 32
VALUES = np.arange(64, dtype=np.float32)


def by_simdgroup(function):
    return np.concatenate([np.broadcast_to(function(VALUES[:32]), 32), np.broadcast_to(function(VALUES[32:]), 32)])


def by_quad(function):
    return np.concatenate([np.broadcast_to(function(q), 4) for q in VALUES.reshape(-1, 4)])


SIMD = {
    "simd_sum(v)": by_simdgroup(np.sum),
    "simd_max(v)": by_simdgroup(np.max),
    "simd_min(v)": by_simdgroup(np.min),
    "simd_product(1 + v / 64)": by_simdgroup(lambda s: np.prod(1 + s / 64)),
    "float(simd_or(uint(v)))": by_simdgroup(lambda s: np.bitwise_or.reduce(s.astype(int))),
    "float(simd_and(uint(v) | 64))": by_simdgroup(lambda s: np.bitwise_and.reduce(s.astype(int) | 64)),
    "float(simd_xor(uint(v)))": by_simdgroup(lambda s: np.bitwise_xor.reduce(s.astype(int))),
    "simd_prefix_inclusive_sum(v)": np.concatenate([VALUES[:32].cumsum(), VALUES[32:].cumsum()]),
    "simd_prefix_exclusive_sum(v)": np.concatenate([VALUES[:32].cumsum(), VALUES[32:].cumsum()]) - VALUES,
    "simd_prefix_inclusive_product(1 + v / 64)": np.concatenate(
        [(1 + VALUES[:32] / 64).cumprod(), (1 + VALUES[32:] / 64).cumprod()]
    ),
    "simd_shuffle(v, 31 - lane)": VALUES - LANES + 31 - LANES,
    "simd_broadcast(v, 5)": VALUES - LANES + 5,
    "simd_broadcast_first(v)": VALUES - LANES,
    "simd_shuffle_xor(v, 9)": VALUES - LANES + (LANES ^ 9),
    "simd_shuffle_up(v, 3)": np.where(LANES < 3, VALUES, VALUES - 3),
    "simd_shuffle_down(v, 3)": np.where(LANES > 28, VALUES, VALUES + 3),
    "simd_shuffle_rotate_up(v, 3)": VALUES - LANES + (LANES - 3) % 32,
    "simd_shuffle_rotate_down(v, 3)": VALUES - LANES + (LANES + 3) % 32,
    "simd_shuffle_and_fill_up(v, -v, 3)": np.where(LANES < 3, -(VALUES + 29), VALUES - 3),
    "simd_shuffle_and_fill_down(v, -v, 3)": np.where(LANES > 28, -(VALUES - 29), VALUES + 3),
    "simd_shuffle_and_fill_up(v, -v, 1, 8)": np.where(LANES % 8 < 1, -(VALUES + 7), VALUES - 1),
    "float(simd_any(v > 40))": by_simdgroup(lambda s: float((s > 40).any())),
    "float(simd_all(v > 31))": by_simdgroup(lambda s: float((s > 31).all())),
    "float(popcount(uint(ulong(simd_ballot(v > 40)))))": by_simdgroup(lambda s: float((s > 40).sum())),
    "float(simd_is_first())": (LANES == 0).astype(float),
    "quad_sum(v)": by_quad(np.sum),
    "quad_max(v)": by_quad(np.max),
    "quad_min(v)": by_quad(np.min),
    "quad_product(1 + v)": by_quad(lambda q: np.prod(1 + q)),
    "quad_broadcast(v, 2)": by_quad(lambda q: q[2]),
    "quad_shuffle(v, 3 - i % 4)": by_quad(lambda q: q[::-1]),
    "quad_shuffle_xor(v, 1)": by_quad(lambda q: q[[1, 0, 3, 2]]),
    "quad_shuffle_up(v, 1)": by_quad(lambda q: q[[0, 0, 1, 2]]),
    "quad_shuffle_down(v, 1)": by_quad(lambda q: q[[1, 2, 3, 3]]),
    "quad_shuffle_rotate_down(v, 1)": by_quad(lambda q: q[[1, 2, 3, 0]]),
    "quad_shuffle_rotate_up(v, 1)": by_quad(lambda q: q[[3, 0, 1, 2]]),
    "simd_sum(float2(v, 1)).y": by_simdgroup(lambda s: 32.0),
    "float(simd_shuffle_down(ulong(v) << 40, 1) >> 40)": np.where(LANES > 30, VALUES, VALUES + 1),
}


def test_operations_among_lanes():
    lines = "".join(f"y[i + {64 * n}] = {e};\n" for n, e in enumerate(SIMD))
    body = I + "float v = x[i]; uint lane = thread_index_in_simdgroup;\n" + lines
    for seed in range(2):
        with sim.options(seed=seed):
            y, report = launch(body, outputs=64 * len(SIMD))
        got = np.array(y).reshape(-1, 64)
        for n, (text, expected) in enumerate(SIMD.items()):
            np.testing.assert_allclose(got[n], expected, rtol=1e-5, err_msg=text)
        assert report.divergent_simd_ops == 0


def test_only_active_lanes_take_part_where_lanes_have_parted():
    with sim.options(allow=frozenset({sim.Fault.DIVERGENT})):
        y, report = launch(I + "if (i % 2 == 0) { y[i] = simd_sum(x[i]); } else { y[i] = simd_max(x[i]); }")
    expected = np.where(VALUES % 2 == 0, by_simdgroup(lambda s: s[::2].sum()), by_simdgroup(lambda s: s[1::2].max()))
    np.testing.assert_array_equal(np.array(y), expected)
    assert report.divergent_simd_ops == 4


def test_lanes_that_leave_a_loop_early_meet_the_others_behind_it():
    body = I + "float s = 0; for (uint k = 0; k < 1 + i % 4; k++) { s += simd_sum(1.0f); } y[i] = s + simd_sum(1.0f);"
    with sim.options(allow=frozenset({sim.Fault.DIVERGENT})):
        y, _ = launch(body)
    in_loop = {0: 32, 1: 32 + 24, 2: 32 + 24 + 16, 3: 32 + 24 + 16 + 8}
    np.testing.assert_array_equal(np.array(y), [in_loop[i % 4] + 32 for i in range(64)])


def test_a_last_simdgroup_that_is_not_full_works_with_the_lanes_it_has():
    y, _ = launch(I + "y[i] = simd_sum(x[i]) + simd_max(x[i]);", count=40, threadgroup=40)
    expected = np.where(np.arange(40) < 32, np.arange(32).sum() + 31, np.arange(32, 40).sum() + 39)
    np.testing.assert_array_equal(np.array(y), expected)


def test_matrix_elements_lie_in_the_lanes_where_apple_puts_them():
    body = (
        "uint lane = thread_index_in_simdgroup; simdgroup_float8x8 m; simdgroup_load(m, x, 8); "
        "uint q = lane / 4; uint row = (q & 4) + (lane / 2) % 4; uint col = (q & 2) * 2 + (lane % 2) * 2; "
        "y[row * 8 + col] = m.thread_elements()[0]; y[row * 8 + col + 1] = m.thread_elements()[1];"
    )
    y, _ = launch(body, count=32, threadgroup=32, outputs=64, x=mx.array(VALUES))
    np.testing.assert_array_equal(np.array(y), VALUES)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_matrix_product_loads_transposed_and_accumulates(dtype):
    a, b = RNG.integers(-3, 4, (2, 8, 8)).astype(np.float32)
    body = (
        "simdgroup_matrix<T, 8, 8> a, b, c = make_filled_simdgroup_matrix<T, 8, 8>(T(1)); "
        "simdgroup_load(a, x, 8, ulong2(0, 0), true); simdgroup_load(b, x + 64, 8); "
        "simdgroup_multiply_accumulate(c, a, b, c); simdgroup_store(c, y, 8);"
    )
    both = mx.array(np.concatenate([a.reshape(-1), b.reshape(-1)])).astype(dtype)
    y, _ = launch(body, count=32, threadgroup=32, outputs=64, x=both, dtype=dtype)
    np.testing.assert_array_equal(np.array(y.astype(mx.float32)).reshape(8, 8), a.T @ b + 1)


def test_atomics():
    relaxed = "memory_order_relaxed"
    body = (
        f"uint i = thread_position_in_grid.x; device atomic_int* a = (device atomic_int*)y; "
        f"atomic_fetch_add_explicit(a, int(i), {relaxed}); atomic_fetch_max_explicit(a + 1, int(i), {relaxed}); "
        f"atomic_fetch_min_explicit(a + 2, -int(i), {relaxed}); atomic_fetch_or_explicit(a + 3, int(i), {relaxed}); "
        f"int seen = atomic_load_explicit(a + 4, {relaxed}); "
        f"while (!atomic_compare_exchange_weak_explicit(a + 4, &seen, seen + 2, {relaxed}, {relaxed})) {{}} "
        f"atomic_fetch_add_explicit((device atomic_float*)y + 5, 0.5f, {relaxed});"
    )
    y, _ = launch(body, count=100, threadgroup=32, outputs=6, init_value=0)
    bits = np.array(y)
    assert bits[:5].view(np.int32).tolist() == [4950, 99, -99, 127, 200]
    assert bits[5] == 50


def test_threadgroup_atomics_and_a_barrier():
    body = (
        "threadgroup atomic_uint n; uint i = thread_position_in_threadgroup.x; "
        "if (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed); "
        "threadgroup_barrier(mem_flags::mem_threadgroup); "
        "atomic_fetch_add_explicit(&n, 2u, memory_order_relaxed); "
        "threadgroup_barrier(mem_flags::mem_threadgroup); "
        "y[i] = float(atomic_load_explicit(&n, memory_order_relaxed));"
    )
    y, report = launch(body)
    assert (np.array(y) == 128).all()
    assert report.barriers == 2


def test_atomic_outputs():
    kernel = sim.metal_kernel(
        name="histogram",
        input_names=["x"],
        output_names=["y"],
        source="atomic_fetch_add_explicit(&y[x[thread_position_in_grid.x]], 1, memory_order_relaxed);",
        atomic_outputs=True,
    )
    picks = RNG.integers(0, 5, 100)
    (y,) = kernel(
        inputs=[mx.array(picks.astype(np.int32))],
        grid=(100, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(5,)],
        output_dtypes=[mx.int32],
        init_value=0,
    )
    np.testing.assert_array_equal(np.array(y), np.bincount(picks, minlength=5))
