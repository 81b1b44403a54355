"""The simulator refuses what Metal refuses and C++ would accept, each beside the form that Metal takes."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab import legal, sim
from cortexmlx.metal.lab.sim import kernel
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741

# name -> (header, right body, header, wrong body, what the message says)
SPACES = {
    "a device helper for constant memory": (
        "inline float first(const device float* p) { return p[0]; }\n",
        "y[i] = first(x);",
        "inline float first(const constant float* p) { return p[0]; }\n",
        "y[i] = first(x);",
        "cannot pass pointer to device as a pointer to constant",
    ),
    "threadgroup memory through a device pointer": (
        "",
        "threadgroup float s[64]; threadgroup float* p = s; p[i] = 1; y[i] = p[i];",
        "",
        "threadgroup float s[64]; device float* p = s; p[i] = 1; y[i] = p[i];",
        "threadgroup float",
    ),
    "a reference to a threadgroup variable": (
        "inline float twice(threadgroup float& v) { return 2 * v; }\n",
        "threadgroup float s[64]; s[i] = 1; y[i] = twice(s[i]);",
        "inline float twice(thread float& v) { return 2 * v; }\n",
        "threadgroup float s[64]; s[i] = 1; y[i] = twice(s[i]);",
        "cannot bind reference",
    ),
    "a local where threadgroup memory is expected": (
        "inline float load(threadgroup float* v) { return v[0]; }\n",
        "threadgroup float s[64]; s[i] = 1; y[i] = load(s + i);",
        "inline float load(threadgroup float* v) { return v[0]; }\n",
        "float s[1] = {1}; y[i] = load(s);",
        "to 'threadgroup float *'",
    ),
    "a parameter that names no space": (
        "inline float twice(float v) { return 2 * v; }\n",
        "y[i] = twice(x[i]);",
        "inline float twice(const float* v) { return 2 * v[0]; }\n",
        "float a = x[i]; y[i] = twice(&a);",
        "names no address space",
    ),
    "a template parameter by reference that names no space": (
        "template <typename U> inline void clear(thread U& v) { v = U(0); }\n",
        "float a = 1; clear(a); y[i] = a;",
        "template <typename U> inline void clear(U& v) { v = U(0); }\n",
        "float a = 1; clear(a); y[i] = a;",
        "names no address space",
    ),
    "a local reference that names no space": (
        "",
        "float a = 1;\nthread float& b = a; b = 2; y[i] = a;",
        "",
        "float a = 1;\nfloat& b = a; b = 2; y[i] = a;",
        "'b' is a pointer or reference that names no address space",
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_address_spaces_are_checked(name):
    right_header, right, wrong_header, wrong, said = SPACES[name]
    launch(I + right, header=right_header)
    with pytest.raises(KernelCompileError, match=r"probe: line \d+") as caught:
        launch(I + wrong, header=wrong_header)
    assert said in str(caught.value)


def test_a_helper_for_device_memory_fails_for_seven_elements_and_works_for_eight():
    header = "inline float first(const device float* p) { return p[0]; }\n"
    launch(I + "y[i] = first(x);", header=header, count=8, threadgroup=8)
    with pytest.raises(KernelCompileError, match="pointer to constant as a pointer to device"):
        launch(I + "y[i] = first(x);", header=header, count=7, threadgroup=7)


BFLOAT = {
    "assignment": ("y[i] = T(float(x[i]));", "float v = x[i]; y[i] = v;"),
    "initialization": ("T v = T(1.5f); y[i] = v;", "T v = 1.5f; y[i] = v;"),
    "product with a float": ("y[i] = T(x[i] * 2.0f);", "y[i] = x[i] * 2.0f;"),
    "half": ("half h = 1; y[i] = T(float(h));", "half h = 1; y[i] = h;"),
}


@pytest.mark.parametrize("name", BFLOAT)
def test_a_float_does_not_become_a_bfloat_by_itself(name):
    right, wrong = BFLOAT[name]
    launch(I + right, dtype=mx.bfloat16)
    with pytest.raises(KernelCompileError, match="bfloat"):
        launch(I + wrong, dtype=mx.bfloat16)
    if name != "half":
        launch(I + wrong, dtype=mx.float16)


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


PLACES = {
    "a program-scope constant": ("constant int N = 3;\n", "constexpr int N = 3;\n", "y[i] = N;", "must be `constant`"),
    "a program-scope table": (
        "constant float TABLE[] = {1, 2, 3};\n",
        "const float TABLE[] = {1, 2, 3};\n",
        "y[i] = TABLE[i % 3];",
        "must be `constant`",
    ),
    "a static member": (
        "struct Sizes { static constexpr constant int N = 3; };\n",
        "struct Sizes { static constexpr int N = 3; };\n",
        "y[i] = Sizes::N;",
        "must be `constant`",
    ),
    "a threadgroup array in a helper": (
        "inline float f(threadgroup float* s, uint i) { s[i] = 1; return s[i]; }\n",
        "inline float f(threadgroup float* s, uint i) { threadgroup float t[64]; t[i] = 1; s[i] = 1; return t[i]; }\n",
        "threadgroup float s[64]; y[i] = f(s, i);",
        "only be declared in the kernel",
    ),
    "an array of variable length": (
        "inline float f(int n) { float a[4] = {0}; return a[n % 4]; }\n",
        "inline float f(int n) { float a[n + 1]; a[n] = 0; return a[n]; }\n",
        "y[i] = f(3);",
        "no arrays of variable length",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_variables_live_where_metal_lets_them(name):
    right, wrong, body, said = PLACES[name]
    launch(I + body, header=right)
    with pytest.raises(KernelCompileError) as caught:
        launch(I + body, header=wrong)
    assert said in str(caught.value)


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
