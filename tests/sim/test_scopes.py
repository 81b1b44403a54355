"""Where Metal lets variables live, and where it does not."""

import pytest

from cortexmlx.errors import KernelCompileError
from support.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741

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
