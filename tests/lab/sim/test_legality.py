"""The simulator asks before it first runs a text what Metal would refuse of it. What is refused: tests/lab/legal."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab import legal, sim
from cortexmlx.metal.lab.sim import kernel
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


def test_a_helper_for_device_memory_fails_for_seven_elements_and_works_for_eight():
    header = "inline float first(const device float* p) { return p[0]; }\n"
    launch(I + "y[i] = first(x);", header=header, count=8, threadgroup=8)
    with pytest.raises(KernelCompileError, match="pointer to constant as a pointer to device"):
        launch(I + "y[i] = first(x);", header=header, count=7, threadgroup=7)


def test_a_float_does_not_become_a_bfloat_by_itself():
    wrong = I + "float v = x[i]; y[i] = v;"
    with pytest.raises(KernelCompileError, match=r"probe: line \d+: .*bfloat"):
        launch(wrong, dtype=mx.bfloat16)
    launch(wrong, dtype=mx.float16)


def test_arithmetic_of_bfloats_stays_bfloat():
    body = (
        "T a = x[i]; a = a * a + a; a += x[i]; a *= 2; a = max(a, -a); float f = a; f += a; y[i] = a > T(f) ? a : T(f);"
    )
    launch(I + body, dtype=mx.bfloat16)


def test_a_struct_may_be_copied_out_of_any_address_space():
    header = "struct Pair { float a; float b; };\ninline float sum(Pair p) { return p.a + p.b; }\n"
    launch(I + "threadgroup Pair s[64]; s[i] = Pair{x[i], 1}; Pair p = s[i]; y[i] = sum(p) + sum(s[i]);", header=header)


def test_a_compile_error_names_the_line_of_the_kernel_text():
    body = "uint i = thread_position_in_grid.x;\ny[i] = nonsense;"
    with pytest.raises(KernelCompileError, match=r"probe: line 7: .*undeclared identifier 'nonsense'"):
        launch(body)
    with sim.options(static_pass=False), pytest.raises(KernelCompileError, match=r"kernel:7:.*'nonsense'"):
        launch(body)


def test_the_pass_can_be_left_out():
    with sim.options(static_pass=False):
        launch(I + "float a = 1;\nfloat& b = a; y[i] = b;")


def test_ordinary_headers_are_not_complained_about():
    header = """
#define SQUARE(v) \\
  ((v) * (v))
template <int N, typename T>
struct Tile {
  static constexpr constant int SIZE = N * N;
  T values[N];
  T sum() thread const { T s = 0; for (int k = 0; k < N; k++) { s += values[k]; } return s; }
};
namespace helpers {
using Four = Tile<4, float>;
typedef float2 Pair;
enum class Kind { A, B };
template <typename T> inline T twice(T v) { constexpr int two = 2; const T w = v; return w * T(two); }
constant float WEIGHTS[2][2] = {{1, 2}, {3, 4}};
}  // namespace helpers
"""
    body = (
        "helpers::Four t; for (int k = 0; k < 4; k++) t.values[k] = k; "
        "y[i] = helpers::twice(t.sum()) + helpers::WEIGHTS[1][i % 2] + SQUARE(2.0f) + helpers::Four::SIZE;"
    )
    launch(I + body, header=header)


def test_without_the_front_end_a_warning_says_that_nothing_is_judged(monkeypatch):
    monkeypatch.setattr(legal, "available", lambda: False)
    kernel._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="pip install libclang"):
        launch(I + "float a = 2;\nfloat& unspaced = a; y[i] = unspaced;")


def test_a_text_that_passed_is_not_judged_again(monkeypatch):
    body = I + "y[i] = x[i] + 41;"
    launch(body)
    monkeypatch.setattr(legal, "complaints", lambda *_: pytest.fail("judged twice"))
    launch(body)
