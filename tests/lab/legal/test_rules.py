"""What the rules refuse that the front end does not check: each text that Metal refuses beside one that it takes."""

import pytest

from cortexmlx.metal.lab.legal import Language
from support.kernels.legal_tools import assert_told_apart, kernel, said

UNNAMED = "names no address space"

# Each table: name -> (what Metal takes, what it refuses, why). The first ones are declarations, the others bodies.
SPACES_DECLARED = {
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
PLACES = {
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
FEATURES_DECLARED = {
    "virtual": ("struct S { int f() { return 1; } };", "struct S { virtual int f() { return 1; } }; //!", "no virtual"),
    "dynamic_cast": (
        "struct A {}; struct B : A {}; inline thread A* f(thread B* b) { return static_cast<thread A*>(b); }",
        "struct A {}; struct B : A {}; inline thread B* f(thread A* a) { return dynamic_cast<thread B*>(a); } //!",
        "no run-time type",
    ),
    "a variable number of arguments": (
        "template <typename... A> inline void f(A... a) {}",
        "inline void f(int a, ...) {} //!",
        "variable number of arguments",
    ),
    "a function named main": ("inline void entry() {}", "inline int main() { return 0; } //!", "main"),
}
DECLARED = {**SPACES_DECLARED, **PLACES, **FEATURES_DECLARED}
SPACES = {
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
FEATURES = {
    "goto": ("for (;;) break;", "goto end; //!\nend:;", "no goto"),
    "long long": ("long v = 1l;", "long long v = 1; //!", "no long long"),
    "a literal of long long": ("long v = 1l;", "long v = 1ll; //!", "no long long"),
    "asm": ("", 'asm("nop"); //!', "no asm"),
    "double": ("float d = 1.0;", "double d = 1.0; //!", "no double"),
    "a literal of long double": ("float v = 1.0f;", "float v = 1.0l; //!", "no long double"),
    "register": ("int r = 1;", "register int r = 1; //!", "no `register`"),
    "thread_local": ("int t = 1;", "thread_local int t = 1; //!", "no thread_local"),
    "new": ("int v = 1;", "auto p = new int; //!", "no new"),
    "delete": ("float v = x[0];", "delete x; //!", "no new and delete"),
    "throw": ("if (i > 3) return;", "throw 1; //!", "no exceptions"),
    "try": ("", "try { x[0] = 1; } catch (...) {} //!", "no exceptions"),
    "typeid": ("int s = sizeof(int);", "auto& t = typeid(int); //!", "no run-time type"),
    "printf": ("x[0] = 1;", 'printf("%d", n); //!', "no printf"),
    "std::": ("float m = metal::max(1.0f, x[0]);", "float m = std::max(1.0f, x[0]); //!", "no std"),
    "a variable named kernel": (
        "int kernels = 3; x[0] = kernels;",
        "int kernel = 3; x[0] = kernel; //!",
        "word of the language",
    ),
    "a variable named vertex": ("int vertices[2];", "int vertex[2]; //!", "word of the language"),
    "a variable named fragment": ("float fragments = 1;", "float fragment = 1; //!", "word of the language"),
}
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
INITIAL_VALUES = {
    "a list of initial values": ("threadgroup int s[2]; s[0] = 1;", "threadgroup int s[2] = {1, 2}; //!"),
    "a list without a sign": ("threadgroup int s[2]; s[0] = 1;", "threadgroup int s[2]{}; //!"),
    "an initial value": ("threadgroup int s; s = 1;", "threadgroup int s = 1; //!"),
    "the initial value of a later variable": ("threadgroup int a, s;", "threadgroup int a, s = 1; //!"),
}
WITHOUT_INITIAL_VALUE = "cannot have an initial value"
BODIES = {
    **SPACES,
    **FEATURES,
    **{name: (*texts, "bfloat") for name, texts in TO_BFLOAT.items()},
    **{name: (*texts, WITHOUT_INITIAL_VALUE) for name, texts in INITIAL_VALUES.items()},
}


@pytest.mark.parametrize("name", DECLARED)
def test_a_declaration_that_metal_refuses(name: str) -> None:
    right, wrong, reason = DECLARED[name]
    assert_told_apart(kernel("", right), kernel("", wrong), reason)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_metal_refuses(name: str) -> None:
    right, wrong, reason = BODIES[name]
    assert_told_apart(kernel(right), kernel(wrong), reason)


# ---- Address spaces -------------------------------------------------------------------------------------------------


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


# ---- The places of variables ---------------------------------------------------------------------------------------


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


# ---- Features of C++ ------------------------------------------------------------------------------------------------


def test_metal_3_1_has_no_lambdas_and_metal_4_has() -> None:
    text = kernel("auto twice = [](float v) { return 2 * v; }; //!\nx[0] = twice(1);")
    assert_told_apart(kernel("x[0] = 2;"), text, "Metal 3.1 has no lambdas")
    assert said(text, Language.METAL_4_0) == []


def test_words_in_comments_and_longer_names_are_not_meant() -> None:
    body = (
        "/* a new double: goto the vertex */ float new_max = 1; int renew = 2; // try to delete long long\n"
        "x[0] = new_max + renew;"
    )
    assert said(kernel(body, "struct S { S() = default; S(int) = delete; };")) == []


# ---- Conversions, in templates as they are instantiated ------------------------------------------------------------


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


# ---- Kernels --------------------------------------------------------------------------------------------------------


def test_what_kernels_take() -> None:
    text = """
constant bool masked [[function_constant(20)]];
struct Params { int n; };
template <typename T>
[[kernel, max_total_threads_per_threadgroup(64)]] void t(
    const device T* x [[buffer(0)]], const constant Params& p [[buffer(1)]],
    const constant int64_t strides[2] [[buffer(2)]],
    const device bool* mask [[buffer(3), function_constant(masked)]], threadgroup float* s [[threadgroup(0)]],
    uint3 tid [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  s[lane] = masked ? p.n : strides[0]; }
[[kernel]] void either(
    const device float* x [[buffer(0), function_constant(masked)]],
    const device half* y [[buffer(0), function_constant(masked)]], device float* z [[buffer(30)]],
    ushort2 at [[thread_position_in_grid]]) { z[at.x] = 1; }
kernel void plain(device float* y, uint2 at [[thread_position_in_grid]]) { y[at.x] = at.y; }
"""
    assert said(text) == []
