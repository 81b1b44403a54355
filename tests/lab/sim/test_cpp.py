"""From Metal's text to C++'s: what is rewritten, lines that stay, and the values of thread attributes."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.sim.cpp import to_cpp

LINES = [
    "float a = 1.5;",
    "threadgroup float s[64];",
    "threadgroup float\n    s[64],\n    t[2];",
    "// threadgroup float comment[1.0];",
    "/* 2.5\n more */ int b = 3;",
    "float4 v = (float4)(1);",
    "auto w = metal::vec<float, 4>(1, 2, 3, 4);",
    'const char* text = "// 1.5";',
    "using Four = vec<half, 4>; Four f = Four(1);",
]


@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_every_line_stays_where_it_was(parts):
    text = "\n".join([*parts, "last_line();"])
    assert to_cpp(text).count("\n") == text.count("\n")
    assert to_cpp(text).splitlines()[-1] == "last_line();"


@pytest.mark.parametrize(
    ("metal", "cpp"),
    [
        ("a = 1.5; // 2.5", "a = 1.5f;       "),
        ("a = 1.5f + .5 + 2. + 1e3;", "a = 1.5f + .5f + 2.f + 1e3f;"),
        ("a = 15 + 0x1e3 + v.x1 + 0x1.8p1 + 1'0.5;", "a = 15 + 0x1e3 + v.x1 + 0x1.8p1f + 1'0.5f;"),
        ("a = 1.5h + .5H + 1e2bf + 2.BF;", "a = 1.5f16 + .5f16 + bfloat((__bf16)1e2) + bfloat((__bf16)2.);"),
        ("a = 1.0f + 10u + 1.5_x + x1.5;", "a = 1.0f + 10u + 1.5_x + x1.5;"),
        ("threadgroup float s[64];", "SIM_THREADGROUP(s, (float), [64])"),
        ("alignas(16) threadgroup half s[4];", "SIM_THREADGROUP(s, (half), [4], alignas(16))"),
        ("threadgroup float s[4], t;", "SIM_THREADGROUP(s, (float), [4]) SIM_THREADGROUP(t, (float), )"),
        ("threadgroup float* p = s;", "threadgroup float* p = s;"),
        ("/*\\\n*/ threadgroup float s[4];", "  \\\n   SIM_THREADGROUP(s, (float), [4])"),
        (
            "threadgroup T s[N] = {0}, t = a * b;",
            "SIM_THREADGROUP(s, (T), [N]) SIM_INITIAL(s, = {0}) SIM_THREADGROUP(t, (T), ) SIM_INITIAL(t, = a * b)",
        ),
        ("threadgroup Tile<A<1>, (2 > 1)> s{{}};", "SIM_THREADGROUP(s, (Tile<A<1>, (2 > 1)>), ) SIM_INITIAL(s, {{}})"),
        ("threadgroup float* f(int a) { return s; }", "threadgroup float* f(int a) { return s; }"),
        ("f(a, threadgroup float v[2]); g();", "f(a, threadgroup float v[2]); g();"),
        ("f(threadgroup float& v);", "f(threadgroup float& v);"),
        ("v = (float4)(x) + vec<float, 4>(a, b);", "v = (float4)(x) + vec<float, 4>(a, b);"),
        ("operator half4() const;", "operator half4() const;"),
        ('p("a // x");', 'p("a // x");'),
    ],
)
def test_what_cpp_would_take_in_another_way_is_rewritten_and_nothing_else(metal, cpp):
    assert to_cpp(metal).rstrip(";") == cpp.rstrip(";")


# Thread attributes, also at the edges of a grid.


def grid_kernel(source, outputs=1):
    names = [f"out_{k}" for k in range(outputs)]
    return sim.metal_kernel(name="grid", input_names=["x"], output_names=names, source=source)


def test_attributes_of_a_grid_that_threadgroups_do_not_divide():
    names = [
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threads_per_grid",
        "threadgroups_per_grid",
    ]
    scalars = [
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "quadgroup_index_in_threadgroup",
        "thread_index_in_quadgroup",
        "threads_per_simdgroup",
    ]
    grid, threadgroup = (7, 5, 3), (4, 3, 2)
    lines = ["uint3 g = thread_position_in_grid; uint at = (g.z * 5 + g.y) * 7 + g.x;"]
    lines += [f"for (int k = 0; k < 3; k++) out_{n}[at * 3 + k] = {name}[k];" for n, name in enumerate(names)]
    lines += [f"out_{n + len(names)}[at] = {name};" for n, name in enumerate(scalars)]
    shapes = [(3, 5, 7, 3)] * len(names) + [(3, 5, 7)] * len(scalars)
    results = grid_kernel("\n".join(lines), len(shapes))(
        inputs=[mx.zeros((8,))],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=shapes,
        output_dtypes=[mx.uint32] * len(shapes),
    )
    got = dict(zip(names + scalars, map(np.array, results), strict=True))
    for z, y, x in itertools.product(range(3), range(5), range(7)):
        at = np.array([x, y, z])
        group = at // threadgroup
        size = np.minimum(threadgroup, grid - group * threadgroup)
        local = at % threadgroup
        index = local[0] + size[0] * (local[1] + size[1] * local[2])
        expected = [at, local, group, size, threadgroup, grid, [2, 2, 2]]
        for name, value in zip(names, expected, strict=True):
            assert got[name][z, y, x].tolist() == list(value), name
        simdgroups = -(-size.prod() // 32)
        values = [index, index % 32, index // 32, simdgroups, index // 4, index % 4, 32]
        for name, value in zip(scalars, values, strict=True):
            assert got[name][z, y, x] == value, name
