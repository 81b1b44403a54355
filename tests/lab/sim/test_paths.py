"""The marks of loops and calls: where marks go, and that the text means what it meant."""

import numpy as np
import pytest

from cortexmlx.metal.lab import sim
from cortexmlx.metal.lab.legal.msl import blank_comments
from cortexmlx.metal.lab.sim.host import inline_includes
from cortexmlx.metal.lab.sim.paths import mark_paths
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
LOOP = "metal::__loop"


@pytest.mark.parametrize(
    "text",
    [
        "void f() { for (int k = 0; k < 3; k++) x[k] = simd_lane_id < (k + 1); }",
        "void f() { simd_sum(1); while (a) b; }",
        "float g(float x) { return x; } kernel void f() { simd_sum(1); do g(1); while (a); }",
    ],
)
def test_a_loop_in_which_lanes_do_not_meet_is_left_alone(text):
    assert LOOP not in mark_paths(text)


@pytest.mark.parametrize(
    "text",
    [
        "void f() { for (int k = 0; k < 3; k++) x[k] = simd_sum(k); }",
        "void f() { while (simd_any(a)) b; }",
        "void f() { do b; while (quad_all(a)); }",
        "void f() { for (auto x : y) { threadgroup_barrier(mem_flags::mem_none); } }",
        "float g() { return simd_max<float>(1); } float h() { return g(); } void f() { while (1) h(); }",
        "struct A { float g() { return simd_max(1); } }; void f() { A a; while (1) a.g(); }",
        "#define SUM(x) simd_sum(x)\nvoid f() { while (1) SUM(1); }",
        "void f() { auto g = [&](float x) { return simd_sum(x); }; while (1) g(1); }",
    ],
)
def test_a_loop_in_which_lanes_meet_is_counted(text):
    marked = mark_paths(text)
    assert marked.count(LOOP) == marked.count("sim_loop.next()") == 1


def test_a_kernel_and_what_is_used_otherwise_gets_no_parameter():
    text = (
        "float a() { return simd_sum(1); }\nfloat b(float); float b(float x) { return simd_sum(x); }\n"
        "[[kernel]] void c() { simd_sum(1); a(); b(1); }\ntemplate <class T> float d(T x) { return simd_sum(x); }\n"
        "template float d<int>(int); void e() { c(); d(1); }"
    )
    marked = mark_paths(text)
    assert [name for name in "abcde" if f" {name}(metal::__site" in marked or f" {name}(T x, metal" in marked] == [
        "a",
        "e",
    ]


@pytest.mark.parametrize(
    "headers", [("quantized.h",), ("sdpa_vector.h", "scan.h"), ("steel/attn/kernels/steel_attention.h",)]
)
def test_lines_stay_lines(headers):
    text = blank_comments(inline_includes(headers))
    marked = mark_paths(text)
    assert LOOP in marked
    assert marked.count("\n") == text.count("\n")


# A kernel for every way to write a loop, and what y[i] must be for 0 <= i < 64.
MEANING = {
    "single statements and dangling else": (
        "if (i > 10) for (int k = 0; k < 3; k++) if (k == 1) n += simd_max(1.0f); else n += 10; else n = 5;",
        lambda i: np.where(i > 10, 21, 5),
    ),
    "unrolled by pragma and macro": (
        "\n#pragma unroll\nfor (int k = 0; k < 4; k++) n += simd_max(float(k));\n"
        "#pragma clang loop unroll(full)\nfor (int k = 0; k < 4; k++) { n += simd_max(float(k)); }\n"
        "UNROLL for (int k = 0; k < 4; k++) n += simd_max(float(k));\n",
        lambda i: 18 + 0 * i,
    ),
    "break, continue and return": (
        "for (int k = 0;; k++) { if (k == 5) break; if (k % 2) continue; n += simd_max(1.0f); } "
        "while (true) { n += simd_max(1.0f); if (n > 6) { y[i] = n; return; } }",
        lambda i: 7 + 0 * i,
    ),
    "do": (
        "int k = 0; do n += simd_max(1.0f); while (++k < 3); "
        "do { if (k++ == 4) continue; n += simd_max(1.0f); } while (k < 7);",
        lambda i: 6 + 0 * i,
    ),
    "conditions that declare": (
        "while (bool more = simd_any(n < 3)) n += more; "
        "for (int k = 0; bool more = k < 3; k++) { n += simd_max(float(more)); }",
        lambda i: 6 + 0 * i,
    ),
    "several conditions and steps": (
        "for (int a = 0, b = 9; a < 3, b > 6; a++, b--) n += simd_max(float(b));",
        lambda i: 24 + 0 * i,
    ),
    "ranges": (
        "float values[3] = {1, 2, 3}; for (float v : values) n += simd_max(v); "
        "for (float v : values) { n += simd_max(v); }",
        lambda i: 12 + 0 * i,
    ),
    "a loop as a condition's else": (
        "if (i < 0) n = 1; else while (n < 3) n += simd_max(1.0f);",
        lambda i: 3 + 0 * i,
    ),
    "a switch": (
        "for (int k = 0; k < 4; k++) switch (k) { "
        "case 0: n += simd_max(1.0f); break; case 3: n += 5; default: n += 10; }",
        lambda i: 36 + 0 * i,
    ),
    "helpers without parameters, with many, recursive, in a struct": (
        "n = one() + Adder{2}.add(1, 2) + down(3) + Adder::twice(1.0f);",
        lambda i: 1 + 5 + 4 + 2 + 0 * i,
    ),
}
HEADER = """
#define UNROLL _Pragma("clang loop unroll(full)")
float one() { return simd_max(1.0f); }
float down(int k) { return k == 0 ? simd_max(1.0f) : 1 + down(k - 1); }
struct Adder {
  float base;
  float add(float a, float b) const { return base + simd_max(a) + b; }
  template <typename T> static T twice(T x) { return simd_max(x) + simd_max(x); }
};
"""


@pytest.mark.parametrize(("name", "checked"), [(name, n % 3 > 0) for n, name in enumerate(MEANING)])
def test_the_text_means_what_it_meant(name, checked):
    body, wanted = MEANING[name]
    with sim.options(checked=checked, allow=frozenset({sim.Fault.DIVERGENT})):
        y, _ = launch(I + "float n = 0;\n" + body + "\ny[i] = n;", header=HEADER)
    np.testing.assert_array_equal(np.array(y), wanted(np.arange(64)))
