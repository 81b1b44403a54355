"""Where variables live."""

import pytest

from support.kernels.legal_tools import assert_told_apart, kernel, said

PAIRS = {
    "a variable at program scope": ("constant int N = 3;", "int N = 3; //!", "must be `constant`"),
    "a constexpr variable at program scope": (
        "constexpr constant int N = 3;",
        "constexpr int N = 3; //!",
        "must be `constant`",
    ),
    "a variable in a namespace": (
        "namespace a { constant float T[] = {1, 2}; }",
        "namespace a { const float T[] = {1, 2}; } //!",
        "must be `constant`",
    ),
    "a variable template": (
        "template <int N> constexpr constant int twice = 2 * N;",
        "template <int N> constexpr int twice = 2 * N; //!",
        "must be `constant`",
    ),
    "a static member": (
        "struct S { static constexpr constant int N = 3; };",
        "struct S { static constexpr int N = 3; }; //!",
        "must be `constant`",
    ),
    "a static variable": (
        "inline int f() { int n = 0; return ++n; }",
        "inline int f() { static int n = 0; return ++n; } //!",
        "static variable in a function",
    ),
    "a threadgroup variable in a helper": (
        "inline float f(threadgroup float* s) { return s[0]; }",
        "inline float f() {\n  threadgroup float s[4]; //!\n  return s[0]; }",
        "only be declared in the kernel",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_variable_lives_where_metal_lets_it(name: str) -> None:
    right, wrong, reason = PAIRS[name]
    assert_told_apart(kernel("", right), kernel("", wrong), reason)


def test_a_kernel_declares_threadgroup_variables_in_every_way() -> None:
    body = (
        "threadgroup float s[64]; threadgroup int a, c[2][3];\n"
        "threadgroup atomic_int count; threadgroup float4 z[2] = {};\n"
        "{ threadgroup vec<half, 2> inner[4]; inner[0] = 1; }\nthreadgroup float* p = s; p[i] = 1; a = c[0][1];"
    )
    template = (
        "template <typename T, int N> [[kernel]] void t(device T* y [[buffer(0)]]) {\n"
        "  threadgroup T s[N]; s[0] = y[0];\n}\n"
    )
    instance = 'template [[host_name("t_float")]] [[kernel]] decltype(t<float, 8>) t<float, 8>;\n'
    assert said(kernel(body, template + instance)) == []
