"""Vectors convert values, never bits, compare to bools, and swizzle: every spelling, against values from Python."""

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import KernelCompileError, KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
HEADER = """
using V = vec<float, 4>;
typedef vec<int, 4> K;
template <class W, class A> W made(A a) { return W(a); }
template <class W, class A> W cast(A a) { return (W)a; }
template <class U> struct Of { using type = vec<U, 4>; };
template <class U> U swizzled(vec<U, 4> v) {
  v.xy = v.zw * U(2);
  v.zw += v.xy - v.yx;
  v.x++;
  v.rgb -= v.bgr;
  return dot(v.xy * v.zw, v.wz + v.xx);
}
struct Pair { float4 v; float3 p; };
union Both { float4 v; float a[4]; };
constant constexpr float4 TABLE[2] = {float4(1, 2, 3, 4), {5, 6, 7, 8}};
"""


def swizzled(v):
    v = np.array(v, dtype=np.float64)
    v[:2] = v[2:] * 2
    v[2:] += v[:2] - v[1::-1]
    v[0] += 1
    v[:3] -= v[2::-1]
    return float((v[:2] * v[2:]) @ (v[3:1:-1] + v[0]))


EXPRESSIONS = {
    # what the kernel computes from f = float4(n + 0.75, 1, 2, 3) and k = int4(n, 1, 2, 3), n = 0 .. 63 -> in Python
    "((V)k).x + ((float4)k).y": lambda n: n + 1,
    "V(k).x": lambda n: n,
    "K(f).x": lambda n: n,
    "float(((int4)f).x)": lambda n: n,
    "float(((K)-f).x)": lambda n: -n,
    "float(((int4)-f).y)": lambda n: -1,
    "((float4)*&k).x": lambda n: n,
    "((vec<float, 4>)k).x": lambda n: n,
    "((metal::vec<float, 4>)k).z": lambda n: 2,
    "made<float4>(k).x": lambda n: n,
    "made<V>(k).x + float(cast<K>(f).x)": lambda n: 2 * n,
    "typename Of<float>::type(k).x": lambda n: n,
    "static_cast<V>(k).x + static_cast<float>(f.x)": lambda n: 2 * n + 0.75,
    "float(half4(k).x) + float(bfloat4(f).y)": lambda n: n + 1,
    "float(bfloat4(half4(k)).w) + float(half4(bfloat4(k)).z)": lambda n: 5,
    "float(uchar4(f).x) + float(ulong4(k).x)": lambda n: 2 * n,
    "float4(k).x + float4(bool4(k)).x": lambda n: n + (n != 0),
    "float((f > 20.0f).x)": lambda n: n + 0.75 > 20,
    "float((f > 20.0f).x == true)": lambda n: n + 0.75 > 20,
    "float(int((k == k).y)) + float((k != k).y)": lambda n: 1,
    "float(all(k >= int4(0, 1, 2, 3)) && !any(k < 0))": lambda n: 1,
    "float(((k > 5) && (k < 9)).x)": lambda n: 5 < n < 9,
    "float(((k > 5) || !(k < 9)).x)": lambda n: n > 5,
    "float((!k).x)": lambda n: n == 0,
    "select(f, -f, k > 5).x": lambda n: -(n + 0.75) if n > 5 else n + 0.75,
    "swizzled(f)": lambda n: swizzled([n + 0.75, 1, 2, 3]),
    "f.wzyx.z + f.rgba.g + f.bb.x": lambda n: 4,
    "f.xxyy.y": lambda n: n + 0.75,
    "max(f.x, f.y) + min(f.zw, 2.5f).y": lambda n: max(n + 0.75, 1) + 2.5,
    "float(sizeof(f.xy) + sizeof(float3) + sizeof(bool3) + sizeof(bool2) + alignof(half3))": lambda n: (
        8 + 16 + 4 + 2 + 8
    ),
    "float(sizeof(Pair))": lambda n: 32,
    "float((k << 1).x + (k >> 1u).x)": lambda n: 2 * n + n // 2,
    "float((1 << k).z) + float((uint4(k) << 33u).x)": lambda n: 4 + 2 * n,
    "float((~k & 7).x | 8)": lambda n: (~n & 7) | 8,
    "float((-k % 5).y + (k / 2).w)": lambda n: 0,
    "(2 * f + k.x - f / 2).y": lambda n: 2 + n - 0.5,
    "float4{f.zw, 5, 6}.y + float4(k.xy, f.xy).x + float4(f.xyz, 1).x": lambda n: 3 + n + n + 0.75,
    "TABLE[i & 1].y + TABLE[1][2]": lambda n: (6 if n & 1 else 2) + 7,
    "as_type<float4>(as_type<uint4>(f)).x": lambda n: n + 0.75,
    "float(as_type<ushort2>(as_type<uint>(half2(1, 2))).y)": lambda n: 0x4000,
    "float(as_type<uint2>(ulong(n) << 32).y)": lambda n: n,
}


def test_vectors_in_every_spelling():
    body = "int n = int(i); float4 f = float4(x[i] + 0.75f, 1, 2, 3); int4 k = int4(n, 1, 2, 3);\n"
    body += "".join(f"y[i + {64 * n}] = {e};\n" for n, e in enumerate(EXPRESSIONS))
    y, _ = launch(I + body, header=HEADER, outputs=64 * len(EXPRESSIONS))
    got = np.array(y).reshape(-1, 64)
    for n, (text, value) in enumerate(EXPRESSIONS.items()):
        np.testing.assert_allclose(got[n], [float(value(k)) for k in range(64)], rtol=1e-6, err_msg=text)


STATEMENTS = {
    "float2 a(x[i], 1); y[i] = a.x;": lambda n: n,
    "float4 a = {x[i], 1, 2, 3}; y[i] = a.x + a.w;": lambda n: n + 3,
    "float4 a = 2.0f, b = 1, c{}; y[i] = a.y + b.z + c.w;": lambda n: 3,
    "float4 a = x[i]; a[1] = 3; thread float4& b = a; b.z += 1; y[i] = a.x + a.y + a.z;": lambda n: 2 * n + 4,
    "float4 a[2] = {{1, 2, 3, 4}, x[i]}; a[1].yz = a[0].xy; y[i] = a[1].x + a[1].z;": lambda n: n + 2,
    "float4 s = 0; for (uint k = 0; k < 4; k++) { s[k] = x[i] * k; } y[i] = s[0] + s[1] + s[2] + s[3];": lambda n: (
        6 * n
    ),
    "Both b; b.v = float4(1, 2, x[i], 4); b.a[1] += b.a[2]; y[i] = b.v.y;": lambda n: n + 2,
    "Pair p; p.v = x[i]; p.p = float3(1, 2, 3); p.p.y = p.v.w; Pair q = p; y[i] = q.p.y + q.p[2];": lambda n: n + 3,
    "threadgroup float4 s[64]; s[i] = 0; s[i].w = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); "
    "y[i] = s[63 - i].w;": lambda n: 63 - n,
    "threadgroup float4 s[16]; s[i / 4][i % 4] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); "
    "y[i] = s[i / 4][i % 4];": lambda n: n,
    "const device float4* p = (const device float4*)x; y[i] = ((float4)*p).y + (*(p + i / 4)).x;": lambda n: (
        1 + n // 4 * 4
    ),
    "half h = half(x[i]); bfloat b = (bfloat)h; h = (half)b; thread half (*p)[1] = 0; y[i] = float(h) + (p == 0);": (
        lambda n: n + 1
    ),
}


def test_declarations_assignments_and_places_of_vectors():
    """One after the other in one kernel."""
    places = [text.replace("y[i]", f"y[i + {64 * n}]") for n, text in enumerate(STATEMENTS)]
    y, _ = launch(I + "".join(f"{{ {text} }}\n" for text in places), header=HEADER, outputs=64 * len(places))
    for got, (text, wanted) in zip(np.array(y).reshape(-1, 64), STATEMENTS.items(), strict=True):
        np.testing.assert_array_equal(got, [wanted(n) for n in range(64)], err_msg=text)


REFUSED = {
    "a vector into one of another type": "int4 k = 1; float4 f = k; y[i] = f.x;",
    "arithmetic of two types": "int4 k = 1; float4 f = 1; y[i] = (k * f).x;",
    "too few components": "float4 f = float4(x[i], 1); y[i] = f.x;",
    "too many components": "float3 f = float3(float2(1), float2(2)); y[i] = f.x;",
    "a component that is not there": "float2 f = 1; y[i] = f.z;",
    "a component twice on the left": "float4 f = 1; f.xx = float2(1, 2); y[i] = f.x;",
    "two alphabets in one name": "float4 f = 1; y[i] = f.xg.x;",
    "an assignment to a copy": "float4 f = 1; f.xyz.y = 2; y[i] = f.y;",
    "a vector as a number": "float4 f = 1; y[i] = f;",
    "arithmetic of bools": "bool4 b = true; y[i] = float((b + b).x);",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_vector_of_metals_does_not_compile(name):
    with pytest.raises(KernelCompileError, match="does not compile"), sim.options(static_pass=False):
        launch(I + REFUSED[name])


def test_a_vector_is_one_access():
    """16 bytes at once, also where its components are then used one by one."""
    body = "float4 v = ((const device float4*)x)[i]; float s = 0; for (int k = 0; k < 4; k++) { s += v[k]; } y[i] = s;"
    x = mx.arange(256).astype(mx.float32)
    y, report = launch(I + body, x=x)
    np.testing.assert_array_equal(np.array(y), np.arange(256).reshape(64, 4).sum(-1))
    assert (report.buffers["x"].reads, report.buffers["x"].bytes_read) == (64, 1024)


def test_a_vector_that_is_not_aligned_is_found():
    with pytest.raises(KernelFault, match="a multiple of 4 only"):
        launch(I + "y[i] = i < 8 ? ((const device float4*)(x + 1))[i].x : 0.0f;")


def test_a_component_beyond_the_last_is_found():
    with pytest.raises(KernelFault, match=r"index \d+ of .*line 6"):
        launch(I + "float4 v = x[i]; y[i] = v[i];")
