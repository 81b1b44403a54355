"""C++17 in what must be C++14, and what OpenCL says that Metal does not."""

import pytest

from cortexmlx.metal.legal import Language
from cortexmlx.metal.legal.diagnostics import verdict
from support.legal_tools import assert_told_apart, kernel, said

PAIR = "struct Pair { float a; float b; };\ntemplate <typename T> struct Box { T v; Box(T t) : v(t) {} };\n"
CPP17 = {
    "structured bindings": ("Pair p = {1, 2};", "Pair p = {1, 2}; auto [a, c] = p; //!", "decomposition"),
    "deduced arguments of a class": ("Box<float> c(1.0f);", "Box c(1.0f); //!", "template argument deduction"),
    "an initializer in an if": (
        "int m = n; if (m > 1) x[0] = m;",
        "if (int m = n; m > 1) x[0] = m; //!",
        "initialization statement",
    ),
}
DECLARED = {
    "nested namespaces": ("namespace a { namespace c {} }", "namespace a::c {} //!", "nested namespace"),
    "fold expressions": (
        "template <typename... A> inline int count(A... a) { return sizeof...(a); }",
        "template <typename... A> inline int sum(A... a) { return (0 + ... + a); } //!",
        "fold expression",
    ),
    "auto as a template's parameter": (
        "template <int N> inline int f() { return N; }",
        "template <auto N> inline int f() { return N; } //!",
        "auto",
    ),
}


@pytest.mark.parametrize("name", [*CPP17, *DECLARED])
def test_cpp17_is_refused_before_metal_4(name: str) -> None:
    right, wrong, reason = {**CPP17, **DECLARED}[name]
    texts = [kernel(t, PAIR) if name in CPP17 else kernel("", t) for t in (right, wrong)]
    assert_told_apart(texts[0], texts[1], reason)
    assert_told_apart(texts[0], texts[1], "C++17, and Metal 3.1 is C++14")
    assert said(texts[1], Language.METAL_4_0) == []


def test_what_mlx_itself_uses_of_cpp17_on_macos_14_is_taken() -> None:
    header = "inline constexpr constant int N = 3;\nstatic_assert(N == 3);"
    assert said(kernel("if constexpr (N > 2) { x[0] = N; }", header)) == []


def test_overloads_that_are_gone_are_said_to_be_missing() -> None:
    said_ = verdict("call to deleted function 'simd_sum'", [], True, None, Language.METAL_3_1)
    assert said_ == "Metal has no overload of 'simd_sum' for this type"


def test_the_reason_that_nothing_fits_is_in_the_message() -> None:
    notes = ["candidate function not viable: no known conversion from 'int' to 'device int *' for 1st argument"]
    said_ = verdict("no matching function for call to 'f'", notes, True, None, Language.METAL_3_1)
    assert (
        said_
        == "no matching function for call to 'f': no known conversion from 'int' to 'device int *' for 1st argument"
    )


def test_a_struct_may_be_copied_out_of_constant_memory() -> None:
    header = "struct P { float a; };\nconstant P TABLE[2] = {{1}, {2}};\ninline float f(P p) { return p.a; }"
    assert said(kernel("P p = TABLE[0]; P q(TABLE[1]); p = TABLE[1]; x[0] = f(TABLE[i]) + p.a + q.a;", header)) == []


def test_warnings_of_other_kinds_are_no_complaints() -> None:
    assert verdict("unused variable 'a'", [], False, "-Wunused", Language.METAL_3_1) is None
