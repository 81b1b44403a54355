"""The rest of the library against Python and NumPy: integers, truth, geometry, literals, names."""

import math
import struct

import numpy as np
import pytest

from cortexmlx.errors import KernelCompileError, KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


def bits(value, width):
    return int(value) & (2**width - 1)


def signed(value, width):
    value = bits(value, width)
    return value - 2**width if value >> (width - 1) else value


EXPRESSIONS = {
    # from v = n = 0 .. 63 as float, u as uint, k = n - 32 as int
    "pow(v, short(2)) + pow(2, v / 64)": lambda n: n**2 + 2 ** (n / 64),
    "fmax(v, 3) + fma(half(2), half(3), 1) + atan2(v, 2)": lambda n: max(n, 3) + 7 + math.atan2(n, 2),
    "mix(v, 2, 0.5f) + step(4, v) + smoothstep(0, 63, v)": (
        lambda n: (n + 2) / 2 + (n >= 4) + (n / 63) ** 2 * (3 - 2 * n / 63)
    ),
    "mix(float2(v, 1), float2(3), 0.25f).x + smoothstep(0.0f, 63.0f, float2(v)).y": (
        lambda n: n + (3 - n) / 4 + (n / 63) ** 2 * (3 - 2 * n / 63)
    ),
    "step(4.0f, float2(v, 9)).x + pow(float2(v, 2), 2.0f).x + max(3.0f, float2(v)).y": (
        lambda n: (n >= 4) + n**2 + max(n, 3)
    ),
    "clamp(int2(k, 9), 0, 5).x + min(int2(k), 3).y": lambda n: min(max(n - 32, 0), 5) + min(n - 32, 3),
    "sinpi(v / 4) + cospi(v / 4)": lambda n: math.sin(math.pi * n / 4) + math.cos(math.pi * n / 4),
    "float(sinpi(v) == 0.0f && cospi(v + 0.5f) == 0.0f)": lambda n: 1,
    "tanpi(v / 256)": lambda n: math.tan(math.pi * n / 256),
    "sign(-v) + fract(-v - 0.25f) + saturate(v - 1)": lambda n: -(n > 0) + 0.75 + min(max(n - 1, 0), 1),
    "float(nextafter(half(v), half(100)))": lambda n: float(np.nextafter(np.float16(n), np.float16(100))),
    "float(nextafter(bfloat(v + 1), bfloat(0)))": lambda n: struct.unpack(
        "f", struct.pack("I", (struct.unpack("I", struct.pack("f", n + 1))[0] >> 16) - 1 << 16)
    )[0],
    "float(ilogb(v + 1)) + ldexp(float2(v), int2(3, -1)).y": lambda n: math.frexp(n + 1)[1] - 1 + n / 2,
    "float(isordered(v, NAN)) + float(isunordered(v, NAN)) * 2 + float(isordered(v, v)) * 4": lambda n: 6,
    "float(isnormal(half(v) * half(6.0e-8))) + float(isnormal(float2(v, 0)).x)": lambda n: (
        n * 2**-24 >= 2**-14 or n > 0
    ),
    "float(isnan(float2(NAN, v)).x) + any(isinf(float2(v, INFINITY))) + signbit(half2(-v - 1)).y": lambda n: 3,
    "float(select(int2(k), int2(u), bool2(true, false)).x)": lambda n: n,
    "float(rotate(uchar2(u, 3), uchar2(3)).x)": lambda n: bits(n << 3, 8) | n >> 5,
    "float(popcount(uint2(u, 7)).x + clz(ushort2(u)).y + ctz(int2(8, k)).x)": (
        lambda n: n.bit_count() + 16 - n.bit_length() + 3
    ),
    "float(reverse_bits(uchar2(u)).y)": lambda n: int(f"{n:08b}"[::-1], 2),
    "float(extract_bits(int2(k), 1, 3).x)": lambda n: signed((n - 32) >> 1, 3),
    "float(extract_bits(char(k), 2, 4))": lambda n: signed((n - 32) >> 2, 4),
    "float(insert_bits(uint2(u), uint2(2), 1, 2).y)": lambda n: (n & ~6) | 4,
    "float(max3(k, 3, -5)) + float(median3(int2(k), int2(3), int2(-5)).x)": (
        lambda n: max(n - 32, 3) + sorted((n - 32, 3, -5))[1]
    ),
    "float(abs(k) + abs(int2(-k)).x)": lambda n: 2 * abs(n - 32),
    "faceforward(float3(1, 2, 3), float3(v - 5, 0, 0), float3(1, 0, 0)).y": lambda n: 2 if n < 5 else -2,
    "reflect(float2(v, 1), float2(0, 1)).y + reflect(float2(v, 1), float2(0, 1)).x": lambda n: n - 1,
    "refract(float2(0.6f, -0.8f), float2(0, 1), 0.5f).x": lambda n: 0.3,
    "refract(float2(0.6f, -0.8f), float2(0, 1), 0.5f).y": lambda n: -((1 - 0.25 * 0.36) ** 0.5),
    "distance(float2(v, 1), float2(0, 1)) + distance_squared(float2(v), float2(1)) + normalize(float2(0, v + 1)).y": (
        lambda n: n + 2 * (n - 1) ** 2 + 1
    ),
    "float(half(length(half2(3, 4)))) + fast::length(float2(3, 4)) + precise::distance(float2(3, 0), float2(0, 4))": (
        lambda n: 15
    ),
    "1.5h + float(1.5bf) + 2.H + 1e1BF + .5h": lambda n: 1.5 + 1.5 + 2 + 10 + 0.5,
    "float(sizeof(1.5h) * 100 + sizeof(1.5bf) * 10 + sizeof(0x1.8p1))": lambda n: 224,
    "0x1.8p1 + 1'000.5 + 1e-1 + float(0x1e3) + float(12'34)": lambda n: 3 + 1000.5 + 0.1 + 0x1E3 + 1234,
    "float(is_same_v<decltype(1.5h), half> && is_same_v<decltype(1.5bf), bfloat> && is_same_v<decltype(1.5), float>)": (
        lambda n: 1
    ),
    "float(_disjunction<is_same<int, float>, is_same<int, int>>::value + metal::_conjunction<is_void<int>>::value)": (
        lambda n: 1
    ),
    "float(make_uniform(int(u)) / make_uniform(3) + 1) + float(uniform<float>(v) * 2)": lambda n: n // 3 + 1 + 2 * n,
    "float(half(bfloat(v)) + half(1)) + float(bfloat(half(v)))": lambda n: 2 * n + 1,
    "float(max(bfloat(v), bfloat(3)) + 1) + float(bfloat(v) < 5)": lambda n: max(n, 3) + 1 + (n < 5),
}
PRE = "float v = x[i]; uint u = uint(v); int k = int(v) - 32; (void)k; (void)u;\n"


def test_functions_in_every_type_and_shape():
    body = PRE + "".join(f"y[i + {64 * n}] = {e};\n" for n, e in enumerate(EXPRESSIONS))
    y, _ = launch(I + body, outputs=64 * len(EXPRESSIONS))
    got = np.array(y).reshape(-1, 64)
    for n, (text, value) in enumerate(EXPRESSIONS.items()):
        expected = [float(value(k)) for k in range(64)]
        np.testing.assert_allclose(got[n], expected, rtol=2e-6, atol=1e-6, err_msg=text)


STATEMENTS = {
    "float c; float s = sincos(x[i], c); y[i] = s * s + c * c;": lambda n: 1,
    "float2 c; float2 s = sincos(float2(x[i]), c); y[i] = (s * s + c * c).y;": lambda n: 1,
    "float w; float f = modf(-x[i] - 0.25f, w); y[i] = f + 10 * w;": lambda n: -0.25 - 10 * n,
    "int2 e; float2 m = frexp(float2(x[i] + 1), e); y[i] = m.x + e.y;": (
        lambda n: math.frexp(n + 1)[0] + math.frexp(n + 1)[1]
    ),
    "metal::array<float, 3> a = {{1, 2, x[i]}}; a[1] += a[2]; float s = 0; for (float v : a) s += v; "
    "y[i] = s + a.size() + a.back();": lambda n: 3 * n + 6,
    "constexpr const uniform<int> two = make_uniform(2); const uniform<int> n = two * two; y[i] = n * x[i];": (
        lambda n: 4 * n
    ),
    "assert(x[i] >= 0); y[i] = x[i];": lambda n: n,
    "threadgroup float s[64] = {0}; threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[i];": lambda n: 0,
    "threadgroup float s[2] = {1.5, 2}, t = 3; threadgroup_barrier(mem_flags::mem_threadgroup); "
    "y[i] = s[0] * s[1] + t;": lambda n: 6,
    "threadgroup array<int2, 2> s{{}};\nthreadgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[1].x;": lambda n: 0,
    "\n#if defined(__HAVE_BFLOAT__)\ny[i] = 1;\n#else\nthis is no code: it's 1.5 of 'nothing\n#endif": lambda n: 1,
    "\n#if defined(__x86_64__) || defined(__linux__) || defined(__ELF__) || defined(__SSE2__) || defined(__unix__) || "
    "defined(__AVX2__) || defined(__aarch64__) || defined(_LP64)\ny[i] = 1;\n#else\ny[i] = 2;\n#endif": lambda n: 2,
}


def test_statements():
    """One after the other in one kernel. What is not Metal may run: initial values are C++'s."""
    for refused in (False, True):
        texts = [text for text in STATEMENTS if refused == ("#" in text or text.startswith("threadgroup"))]
        places = [text.replace("y[i]", f"y[i + {64 * n}]") for n, text in enumerate(texts)]
        with sim.options(static_pass=not refused):
            y, _ = launch(I + "".join(f"{{ {text}\n }}\n" for text in places), outputs=64 * len(places))
        for got, text in zip(np.array(y).reshape(-1, 64), texts, strict=True):
            np.testing.assert_allclose(got, [STATEMENTS[text](n) for n in range(64)], rtol=1e-6, err_msg=text)


def test_a_fence_of_metal_3_2():
    """Nothing to see in memory that is always up to date. Metal 3.1, by which texts are judged, has no such fence."""
    text = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device); y[i] = x[i];"
    with sim.options(static_pass=False):
        y, _ = launch(I + text)
    assert y.tolist() == list(range(64))


def test_an_array_parameter_in_constant_memory():
    header = "inline float third(const constant float s[3]) { return s[2]; }\n"
    y, _ = launch(I + "y[i] = third(x);", header=header, count=4, threadgroup=4)
    assert y.tolist() == [2, 2, 2, 2]


def test_an_assertion_that_fails_is_a_fault_with_its_words_and_line():
    with pytest.raises(KernelFault, match=r"assertion fails: x\[i\] < 5.*line 6"):
        launch(I + "assert(x[i] < 5); y[i] = 0;")


def test_an_initial_value_that_another_thread_overwrites_is_a_race():
    with sim.options(static_pass=False), pytest.raises(KernelFault, match="race"):
        launch(I + "threadgroup float s[64] = {0}; s[63 - i] = 1; y[i] = 0;")


@pytest.mark.parametrize("text", ["sqrt(u)", "pow(u, u)", "max(v, 1)", "clamp(v, 0, 1)", "dot(v, v)", "min(u, 3)"])
def test_what_metal_calls_ambiguous_or_unknown_does_not_compile(text):
    with pytest.raises(KernelCompileError, match="does not compile"), sim.options(static_pass=False):
        launch(I + f"float v = x[i]; uint u = i; y[i] = {text};")


def test_fast_functions_overflow_where_their_steps_do():
    """Metal computes fast::tanh as (t - 1) / (t + 1) with t = exp(2 x): infinity by infinity from 44.4 on."""
    y, _ = launch(I + "y[i] = fast::tanh(x[i]);")
    exact, _ = launch(I + "y[i] = precise::tanh(x[i]);")
    assert np.isnan(np.array(y)[45:]).all() and np.allclose(np.array(y)[:44], np.array(exact)[:44], rtol=1e-6)
    assert np.array(exact)[45:].tolist() == [1.0] * 19
    y, _ = launch(I + "y[i] = i % 2 ? fast::pow(-x[i], 2.0f) : precise::pow(-x[i], 2.0f);")
    assert np.isnan(np.array(y)[1::2]).all() and np.array(y)[2].item() == 4.0
