"""C++17 in what must be C++14, and what OpenCL says that Metal does not."""

import pytest

from cortexmlx.metal.lab.legal import Language
from cortexmlx.metal.lab.legal.diagnostics import verdict
from support.kernels.legal_tools import assert_told_apart, kernel, said

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


SWIZZLES = {
    "a remainder": ("int", "v.xy % v.zw", "float", "('vec<float, 2>' and 'vec<float, 2>')"),
    "bits": ("uint", "v.xy & 3", "half", "('vec<half, 2>' and 'int')"),
    "an inversion": ("int", "~v.xy", "float", "'vec<float, 2>' to unary expression"),
    "an update by a shift": ("int", "v.xy <<= v.zw", "float", "('vec<float, 2>' and 'vec<float, 2>')"),
    "a bfloat and a float": ("float", "v.xy * x[0]", "bfloat", "('vec<__bf16, 2>' and 'device float')"),
    "a bfloat and a half": ("float", "v.xy + b[0]", "half", "('vec<half, 2>' and 'device bfloat'"),
    "vectors of unlike elements": ("float", "v.xy - float4(1).xy", "half", "('vec<half, 2>' and 'vec<float, 2>')"),
}


@pytest.mark.parametrize("name", SWIZZLES)
def test_operators_of_swizzles_are_judged_as_they_are_instantiated(name: str) -> None:
    fits, expression, refused, reason = SWIZZLES[name]
    header = (
        "template <typename T> inline void f(metal::vec<T, 4> v, device float* x, device bfloat* b) {\n"
        f"  (void)({expression}); //!\n}}"
    )
    right, wrong = (kernel(f"f({one}4(1), x, b);", header) for one in (fits, refused))
    assert_told_apart(right, wrong, reason)


def test_every_operator_of_swizzles_in_a_template_is_taken() -> None:
    body = (
        "v.xy += v.zw; v.xy += T(1); v.rgb *= v.bgr; v.zw /= T(2); v.xy = -v.xy + 2 * v.zw - v.yx / v.wz; "
        "return (v.xy < v.zw).x + all(v.xy == v.zw) + any(!(v.xy != v.yx)) + (v.xx * v.y).x;"
    )
    header = f"template <typename T> inline float f(metal::vec<T, 4> v) {{ {body} }}"
    assert said(kernel("x[0] = f(float4(1)) + f(half4(1)) + f(bfloat4(1)) + f(int4(1));", header)) == []


def test_warnings_of_other_kinds_are_no_complaints() -> None:
    assert verdict("unused variable 'a'", [], False, "-Wunused", Language.METAL_3_1) is None
