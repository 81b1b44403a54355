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


BODIES = {
    "a list of initial values": ("threadgroup int s[2]; s[0] = 1;", "threadgroup int s[2] = {1, 2}; //!"),
    "a list without a sign": ("threadgroup int s[2]; s[0] = 1;", "threadgroup int s[2]{}; //!"),
    "an initial value": ("threadgroup int s; s = 1;", "threadgroup int s = 1; //!"),
    "the initial value of a later variable": ("threadgroup int a, s;", "threadgroup int a, s = 1; //!"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_threadgroup_variable_has_no_initial_value(name: str) -> None:
    right, wrong = BODIES[name]
    assert_told_apart(kernel(right), kernel(wrong), "cannot have an initial value")


def test_a_kernel_has_32_kb_of_threadgroup_memory() -> None:
    """What a branch declares is not counted: a launch does that, when it is known which branches are left."""
    most = "threadgroup float s[4096]; threadgroup float t[4096]; s[i] = 1; t[i] = 1;"
    reason = "32784 bytes of threadgroup memory, at most 32768"
    assert_told_apart(kernel(most), kernel(most + " threadgroup uchar c; c = 1; //!"), reason)
    assert said(kernel(most + " if (sizeof(int) == 2) { threadgroup uchar c; c = 1; }")) == []


def test_the_threadgroup_memory_of_an_instance_is_counted() -> None:
    text = "template <int N> [[kernel]] void t(device float* y [[buffer(0)]]) {{\n"
    text += "  threadgroup float s[N]; s[0] = y[0]; {}}}\n"
    instance = 'template [[host_name("t")]] [[kernel]] decltype(t<{0}>) t<{0}>;\n'
    assert_told_apart(
        text.format("") + instance.format(8192), text.format("//!\n") + instance.format(16384), "65536 bytes"
    )


@pytest.mark.parametrize("name", PAIRS)
def test_a_variable_lives_where_metal_lets_it(name: str) -> None:
    right, wrong, reason = PAIRS[name]
    assert_told_apart(kernel("", right), kernel("", wrong), reason)


def test_a_kernel_declares_threadgroup_variables_in_every_way() -> None:
    body = (
        "threadgroup float s[64]; threadgroup int a, c[2][3];\n"
        "threadgroup atomic_int count; threadgroup float4 z[2];\n"
        "{ threadgroup vec<half, 2> inner[4]; inner[0] = 1; }\nthreadgroup float* p = s; p[i] = 1; a = c[0][1];"
    )
    template = (
        "template <typename T, int N> [[kernel]] void t(device T* y [[buffer(0)]]) {\n"
        "  threadgroup T s[N]; s[0] = y[0];\n}\n"
    )
    instance = 'template [[host_name("t_float")]] [[kernel]] decltype(t<float, 8>) t<float, 8>;\n'
    assert said(kernel(body, template + instance)) == []
