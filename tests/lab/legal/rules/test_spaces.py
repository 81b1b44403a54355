"""Pointers and references that name no address space, and objects used in a space they are not made for."""

import pytest

from support.kernels.legal_tools import assert_told_apart, kernel, said

UNNAMED = "names no address space"

# name -> (what Metal takes, what it refuses, why)
PAIRS = {
    "a parameter that is a pointer": (
        "inline float f(const thread float* p) { return p[0]; }",
        "inline float f(const float* p) { return p[0]; } //!",
        UNNAMED,
    ),
    "a parameter that is a reference": (
        "inline void f(thread float& v) { v = 0; }",
        "inline void f(float& v) { v = 0; } //!",
        UNNAMED,
    ),
    "a template's parameter": (
        "template <typename U> inline void f(thread U& v) { v = U(0); }",
        "template <typename U> inline void f(U& v) { v = U(0); } //!",
        UNNAMED,
    ),
    "a parameter on a line of its own": (
        "inline float f(\n    int a,\n    const device float* p) { return p[a]; }",
        "inline float f(\n    int a,\n    const float* p) { //!\n  return p[a]; }",
        UNNAMED,
    ),
    "a member": ("struct S { device float* p; };", "struct S { float* p; }; //!", UNNAMED),
    "a returned pointer": (
        "inline device float* f(device float* p) { return p + 1; }",
        "inline float* f(device float* p) { return 0; } //!",
        UNNAMED,
    ),
    "an alias": ("using P = device float*;", "using P = float*; //!", UNNAMED),
    "a typedef": ("typedef const device float* P;", "typedef const float* P; //!", UNNAMED),
    "a pointer to a pointer": (
        "inline void f(device float* thread* p) { *p += 1; }",
        "inline void f(device float** p) {} //!",
        UNNAMED,
    ),
}
IN_KERNEL = {
    "a local pointer": (
        "float a = 1; thread float* p = &a; *p = 2;",
        "float a = 1; float* p = &a; *p = 2; //!",
        UNNAMED,
    ),
    "a local reference": ("float a = 1; thread float& r = a; r = 2;", "float a = 1; float& r = a; r = 2; //!", UNNAMED),
    "the variable of a range": (
        "float a[4]; for (thread float& v : a) { v = 0; }",
        "float a[4]; for (float& v : a) { v = 0; } //!",
        UNNAMED,
    ),
    "a template's argument": (
        "bool same = metal::is_same_v<device float*, device float*>; metal::array<device float*, 2> a;",
        "metal::array<float*, 2> a; //!",
        UNNAMED,
    ),
    "a cast": ("auto p = (device int*)x;", "float a = 1; auto p = (int*)&a; //!", UNNAMED),
    "a reinterpret_cast": (
        "float a = 1; thread int& v = reinterpret_cast<thread int&>(a);",
        "float a = 1; auto p = reinterpret_cast<int*>(&a); //!",
        UNNAMED,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pointer_or_reference_names_its_space(name: str) -> None:
    right, wrong, reason = PAIRS[name]
    assert_told_apart(kernel("", right), kernel("", wrong), reason)


@pytest.mark.parametrize("name", IN_KERNEL)
def test_so_does_one_in_a_function(name: str) -> None:
    right, wrong, reason = IN_KERNEL[name]
    assert_told_apart(kernel(right), kernel(wrong), reason)


def test_a_member_function_is_marked_for_the_space_of_its_object() -> None:
    header = (
        "struct S {{ float v; float get() const {} {{ return v; }} }};\n"
        "inline float f(device S* s) {{ return s->get(); }} //!"
    )
    assert_told_apart(kernel("", header.format("device")), kernel("", header.format("")), "mark the function `device`")


def test_a_reference_to_thread_memory_takes_what_lies_there() -> None:
    """A temporary, a local and a number, but no object in device memory."""
    header = (
        "struct S { float v; };\ninline float f(const thread S& s) { return s.v; }\n"
        "inline S made(S s, float v) { return S{s.v + v}; }\n"
    )
    right = kernel("device S* d = (device S*)x; S s = {1}; x[i] = f(s) + f(S{2}) + f(made(d[1], x[0]));", header)
    wrong = kernel("device S* s = (device S*)x; x[i] = f(*s); //!", header)
    assert_told_apart(right, wrong, "the argument lies in device memory")


def test_what_deduces_its_space_names_none() -> None:
    body = "auto p = x + 1; auto& v = x[0]; v = *p; float a[3] = {}; for (auto& e : a) e = 1; x[1] = a[2];"
    assert (
        said(kernel(body, "inline float f(float a[4]) { return a[1]; }\ntemplate <class F> void g(F&& f) { f(); }"))
        == []
    )


def test_a_reference_to_a_pointer_into_a_named_space_is_taken() -> None:
    """MLX's quantized kernels have `const device T*& x`."""
    assert said(kernel("const device float* p = x; f(p);", "inline void f(const device float*& p) { p += 1; }")) == []


def test_functions_have_pointers_without_a_space() -> None:
    assert said(kernel("float (*g)(float) = f; x[i] = g(1);", "inline float f(float a) { return a; }")) == []
