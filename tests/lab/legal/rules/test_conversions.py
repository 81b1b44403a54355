"""Conversions that Metal does not make by itself, in templates as they are instantiated, and elements of vectors."""

import pytest

from support.kernels.legal_tools import assert_told_apart, kernel, said

TO_BFLOAT = {
    "initialization": ("bfloat v = bfloat(x[0]);", "bfloat v = x[0]; //!"),
    "direct initialization": ("bfloat v(1);", "float f = 1; bfloat v(f); //!"),
    "a literal": ("bfloat v = 1.5bf;", "bfloat v = 1.5f; //!"),
    "assignment": ("b[0] = bfloat(float(b[1]));", "b[0] = float(b[1]); //!"),
    "a product with a float": ("b[0] = bfloat(b[1] * 2.0f);", "b[0] = b[1] * 2.0f; //!"),
    "an update": ("b[0] *= b[1];", "b[0] *= 2.0f; //!"),
    "a conditional": ("b[0] = i > 0 ? b[1] : bfloat(0);", "b[0] = i > 0 ? b[1] : 0.0f; //!"),
    "an array": ("bfloat v[2] = {bfloat(x[0]), 1};", "bfloat v[2] = {x[0], 1}; //!"),
    "half": ("half h = 1; b[0] = bfloat(h); h = half(b[0]);", "half h = 1; b[0] = h; //!"),
    "half from bfloat": ("half h = half(b[0]);", "half h = b[0]; //!"),
}


@pytest.mark.parametrize("name", TO_BFLOAT)
def test_no_float_becomes_a_bfloat_by_itself(name: str) -> None:
    right, wrong = TO_BFLOAT[name]
    assert_told_apart(kernel(right), kernel(wrong), "bfloat")


def test_a_bfloat_and_whole_numbers_get_on() -> None:
    body = (
        "bfloat v = 0; v = b[0] * b[1] + v; v += b[2]; v *= 2; float f = v; f += v; v = -v; "
        "v = max(v, b[1]); if (v > 0) b[0] = v;"
    )
    assert said(kernel(body)) == []


HELPER = "template <typename T> inline T half_of(T v) {\n  return v * 0.5f; //!\n}\n"


def test_a_template_is_judged_as_it_is_instantiated() -> None:
    """The same text is right for float and wrong for bfloat: only the instantiation tells."""
    assert_told_apart(kernel("x[0] = half_of(x[1]);", HELPER), kernel("b[0] = half_of(b[1]);", HELPER), "bfloat")


def test_a_kernel_template_is_judged_as_it_is_instantiated() -> None:
    template = "template <typename T> [[kernel]] void t(device T* y [[buffer(0)]]) {\n  y[0] = float(y[1]); //!\n}\n"

    def instance(name: str) -> str:
        return f'{template}template [[host_name("t")]] [[kernel]] decltype(t<{name}>) t<{name}>;\n'

    assert_told_apart(instance("float"), instance("bfloat"), "bfloat")


def test_a_member_of_a_template_is_judged_as_it_is_instantiated() -> None:
    tile = "template <typename T> struct Tile {\n  T v;\n  void scale(float f) {\n    v = v * f; //!\n  }\n};\n"
    assert_told_apart(kernel("Tile<float> t; t.scale(2);", tile), kernel("Tile<bfloat> t; t.scale(2);", tile), "bfloat")


ELEMENTS = {
    "an address": ("float4 v; float e = v.y; thread float4* p = &v;", "float4 v; auto p = &v.y; //!", "no address"),
    "an address in a packed vector": (
        "packed_float3 v; thread float* p = &v[0];",
        "packed_float3 v; thread float* p = &v.y; //!",
        "no address",
    ),
    "a reference": ("float4 v; thread float4& r = v;", "float4 v; thread float& r = v.x; //!", "element of a vector"),
    "an argument": ("float v; f(v);", "float2 v; f(v.x); //!", "element of a vector"),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_an_element_of_a_vector_has_no_address(name: str) -> None:
    right, wrong, reason = ELEMENTS[name]
    header = "inline void f(thread float& v) { v = 0; }"
    assert_told_apart(kernel(right, header), kernel(wrong, header), reason)
