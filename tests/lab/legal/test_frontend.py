"""What the front end says by itself: address spaces, types, and the overloads of Metal's library."""

import re

import pytest

from cortexmlx.metal.lab.legal import Language, complaints
from cortexmlx.metal.lab.legal.diagnostics import find_objection
from cortexmlx.metal.lab.legal.frontend import parse, swizzle_header, to_metal_words, walk
from cortexmlx.metal.lab.sim.toolchain import mlx_headers
from support.kernels.legal_tools import assert_refused, assert_told_apart, kernel, said

# name -> (what Metal takes, what it refuses, why)
SPACES = {
    "threadgroup memory through a device pointer": (
        "threadgroup float s[8]; threadgroup float* p = s; p[i] = 1;",
        "threadgroup float s[8]; device float* p = s; //!",
        "device float *",
    ),
    "device memory through a threadgroup pointer": (
        "device float* p = x;",
        "threadgroup float* p = x; //!",
        "threadgroup float *",
    ),
    "a constant through a device pointer": (
        "const constant int* p = &n;",
        "const device int* p = &n; //!",
        "device int *",
    ),
    "a reference into another space": (
        "device float& v = x[0];",
        "thread float& v = x[0]; //!",
        "changes address space",
    ),
    "a C cast into another space": (
        "auto p = (device int*)x;",
        "auto p = (threadgroup int*)x; //!",
        "mismatching address spaces",
    ),
    "a reinterpret_cast into another space": (
        "auto p = reinterpret_cast<device int*>(x);",
        "auto p = reinterpret_cast<threadgroup int*>(x); //!",
        "threadgroup int *",
    ),
    "a local given to a function for device memory": (
        "f(x);",
        "float v = 1; f(&v); //!",
        "cannot pass pointer to thread as a pointer to device",
    ),
    "threadgroup memory given to a function for device memory": (
        "f(x + 1);",
        "threadgroup float s[8]; f(s); //!",
        "device float *",
    ),
    "an element of device memory given to a thread reference": (
        "float v; g(v);",
        "g(x[1]); //!",
        "",
    ),
    "writing what is constant": ("int m = n; m = 2;", "n = 2; //!", ""),
    "writing through a pointer to const": (
        "device float* p = x; *p = 1;",
        "const device float* p = x; *p = 1; //!",
        "",
    ),
    "a variable in device memory": ("float v = 1;", "device float v; //!", "device memory cannot be declared"),
    "a literal without a space": (
        'const constant char* s = "text";',
        'const device char* s = "text"; //!',
        "",
    ),
}
TYPES = {
    "eight elements": ("vec<float, 4> v;", "vec<float, 8> v; //!", "vec<float, 8>"),
    ".lo": ("float2 v = float4(1).xy;", "float2 v = float4(1).lo; //!", "no member named 'lo'"),
    ".hi": ("float2 v = float4(1).zw;", "float2 v = float4(1).hi; //!", "no member named 'hi'"),
    ".s0": ("float v = float4(1).x;", "float v = float4(1).s0; //!", "no member named 's0'"),
    "an element that is not there": ("float v = float2(1).y;", "float v = float2(1).z; //!", "no member named 'z'"),
    "writing an element twice": ("float4 v; v.xy = v.yx;", "float4 v; v.xx = v.xy; //!", "setter"),
    "too many components": (
        "float3 v(1, float2(2));",
        "float3 v(float2(1), float2(2)); //!",
        "no matching constructor",
    ),
    "a vector of other elements": ("float4 v = float4(int4(1));", "float4 v = int4(1); //!", "no viable conversion"),
    "vectors of unlike elements": (
        "auto v = float4(1) + float4(2);",
        "auto v = float4(1) + int4(2); //!",
        "invalid operands",
    ),
    "vectors of unlike width": (
        "auto v = float4(1) * 2.0f;",
        "auto v = float4(1) * float2(2); //!",
        "invalid operands",
    ),
    "remainders of floats": (
        "auto v = fmod(float4(1), float4(2));",
        "auto v = float4(1) % float4(2); //!",
        "invalid operands",
    ),
    "a vector as a condition": ("if (any(float2(1) < 2)) x[0] = 1;", "if (float2(1) < 2) x[0] = 1; //!", "bool"),
    "as_type of another size": ("uint v = as_type<uint>(1.0f);", "ushort v = as_type<ushort>(1.0f); //!", "same size"),
    "a length that is not constant": ("float a[4];", "float a[n + 1]; //!", "variable length"),
    "a simdgroup matrix of another size": (
        "simdgroup_matrix<float, 8, 8> m;",
        "simdgroup_matrix<float, 16, 16> m; //!",
        "8 x 8",
    ),
    "a name that is not declared": ("x[0] = 1;", "x[0] = nonsense; //!", "undeclared identifier 'nonsense'"),
}
OVERLOADS = {
    "simd_sum(long)": ("int s = simd_sum(int(i));", "long s = simd_sum(long(i)); //!", "no overload of 'simd_sum'"),
    "simd_max(bool)": ("bool m = simd_any(i > 3);", "bool m = simd_max(i > 3); //!", "no overload of 'simd_max'"),
    "simd_product of a long vector": (
        "int2 s = simd_product(int2(1));",
        "long2 s = simd_product(long2(1)); //!",
        "simd_product",
    ),
    "simd_and(float)": ("uint v = simd_and(i);", "float v = simd_and(1.0f); //!", "simd_and"),
    "simd_shuffle_xor(bool)": (
        "uint v = simd_shuffle_xor(uint(i > 3), 1);",
        "bool v = simd_shuffle_xor(i > 3, 1); //!",
        "simd_shuffle_xor",
    ),
    "dot(int4)": ("float d = dot(float4(1), float4(2));", "int d = dot(int4(1), int4(2)); //!", "'dot'"),
    "fma(int)": ("float f = fma(1.0f, 2.0f, 3.0f);", "int f = fma(1, 2, 3); //!", "ambiguous"),
    "exp(int)": ("float e = exp(float(n));", "float e = exp(n); //!", "ambiguous"),
    "min(int, uint)": ("int m = min(n, int(i));", "int m = min(n, i); //!", "ambiguous"),
    "max(float, int)": ("float m = max(x[0], float(n));", "float m = max(x[0], n); //!", "ambiguous"),
    "popcount(float)": ("uint p = popcount(i);", "uint p = popcount(1.5f); //!", "ambiguous"),
    "normalize(scalar)": ("float3 v = normalize(float3(1));", "float v = normalize(1.0f); //!", "normalize"),
    "select by an integer": (
        "float4 v = select(float4(1), float4(2), bool4(true));",
        "float4 v = select(float4(1), float4(2), int4(1)); //!",
        "'select'",
    ),
    "sincos into device memory": ("float c; float s = sincos(1.0f, c);", "float s = sincos(1.0f, x[0]); //!", "sincos"),
    "halves times bfloats": (
        "simdgroup_float8x8 c(0), f(1); simdgroup_half8x8 a(1); simdgroup_multiply_accumulate(c, a, f, c);",
        "simdgroup_float8x8 c(0); simdgroup_half8x8 a(1); simdgroup_bfloat8x8 b(1);\n"
        "simdgroup_multiply_accumulate(c, a, b, c); //!",
        "simdgroup_multiply_accumulate",
    ),
    "simdgroup_load from thread memory": (
        "simdgroup_float8x8 m; simdgroup_load(m, x);",
        "float a[64]; simdgroup_float8x8 m; simdgroup_load(m, a); //!",
        "simdgroup_load",
    ),
    "a barrier without its memory": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "threadgroup_barrier(); //!",
        "threadgroup_barrier",
    ),
}
HEADER = "inline void f(device float* p) { p[0] = 1; }\ninline void g(thread float& v) { v = 1; }"


@pytest.mark.parametrize("name", SPACES)
def test_a_pointer_into_one_space_is_none_into_another(name: str) -> None:
    right, wrong, reason = SPACES[name]
    assert_told_apart(kernel(right, HEADER), kernel(wrong, HEADER), reason)


@pytest.mark.parametrize("name", [*TYPES, *OVERLOADS])
def test_metal_has_not(name: str) -> None:
    _, wrong, reason = {**TYPES, **OVERLOADS}[name]
    assert_refused(kernel(wrong), reason)


def test_without_mlx_a_bool_cannot_be_shuffled() -> None:
    """MLX's preamble declares `simd_shuffle(bool, ...)` for its own kernels, so with it the text is legal."""
    text = kernel("bool v = simd_shuffle(i > 3, 1);").replace("bfloat* b", "float* b")
    assert said(text) == []
    bare = "#include <metal_stdlib>\nusing namespace metal;\n"
    assert ["no overload of 'simd_shuffle'" in c.message for c in complaints(bare + text, preamble="")] == [True]


def test_fences_came_with_a_later_metal() -> None:
    text = kernel("atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device); //!")
    assert_told_apart(kernel(""), text, "memory_order_seq_cst")
    assert said(text, Language.METAL_4_0) == []


LEGAL = {
    "a vector made by a call, by braces and by a cast": (
        "float2 a(x[0], 1); float4 c = {1, 2, 3, 4}; auto d = (float4)int4(1); c = vec<float, 4>(a, a);"
    ),
    "static_cast of an element": "int v = static_cast<int>(float4(1).w); half h = static_cast<half>(x[0]);",
    "assert": "assert(i < 64);",
    "dead text": "#if 0\n double d = std::nonsense;\n#endif\nx[0] = 1;",
    "bfloat is there": "#ifdef __HAVE_BFLOAT__\nbfloat v = 1.5bf;\n#else\n#error no bfloat\n#endif",
    "an array of constants as a parameter": "x[0] = table_sum(TABLE);",
    "pow(float, short)": "short e = 2; x[0] = pow(x[0], e);",
    "matrices": "float4x4 m(1.0f); float4 v = m * float4(1); x[0] = (m * m)[1][2] + v.x + transpose(m)[0].y;",
    "literals": "half h = 1.5h; bfloat v = 2.5bf; float f = 1.5; uint u = 3u; x[0] = h + f + v + u;",
    "recursion in compute functions": "x[0] = factorial(4);",
    "pointers to functions": "int (*f)(int) = factorial; x[0] = f(3);",
    "swizzles": "float4 v = 1; v.xy += v.zw; v.rgb = v.bgr; v.wzyx *= 2.0f; x[0] = v.xxyy.z + v.a;",
    "vectors in device and constant memory": (
        "device float4* p = (device float4*)x; p->x = 1; p[1].yz = p[0].xy; float4 w = p[1] * 2; p[2] = w; "
        "x[0] = ROW[1] + (ROW * 2.0f).x;"
    ),
    "structs from every space": (
        "device Pair* p = (device Pair*)x; threadgroup Pair s[2]; s[0] = p[0]; Pair q = s[0]; q = PAIR; "
        "p[1] = q; x[0] = sum(p[1]) + sum(PAIR) + sum(s[1]);"
    ),
    "parts of a struct": "Pair q = {1, 2}; Pair r = q; r.a += q.b; thread Pair* p = &r; x[0] = p->a;",
    "logical operators of vectors": "bool4 m = float4(1) < 2 && !(float4(2) == 2); x[0] = all(m) ? 1 : any(m.xy);",
    "comparisons and selections": (
        "float4 v = select(float4(1), float4(2), float4(3) > 2); x[0] = max3(v.x, v.y, v.z) + clamp(v, 0.0f, 1.0f).x;"
    ),
    "integer functions": (
        "x[0] = popcount(i) + clz(i) + ctz(n) + extract_bits(i, 1, 3) + abs(long(n)) + min(2ul, 3ul);"
    ),
    "other names for vectors": (
        "using V = vec<half, 4>; typedef metal::uint2 U; V v = V(1); U u = U(1, 2); "
        "x[0] = v[u.x] + float(V(float4(1)).x);"
    ),
    "words of OpenCL": "int local = 1, global = 2, generic = 3, pipe = 4; x[0] = local + global + generic + pipe;",
    "a switch and loops": "switch (n) { case 1: x[0] = 1; break; default: x[1] = 2; } do { x[2]++; } while (x[2] < 3);",
    "shifts of vectors": "uint4 u = uint4(1) << 3u; u >>= 1; u &= 3; u = u | (u ^ ~u); x[0] = u.x % 3 + (u % 2).y;",
    "tables": "x[0] = TABLE[i % 4] + Sizes::N;",
    "fast and precise": "x[0] = fast::exp(x[0]) + precise::sin(x[1]) + metal::fast::tanh(x[2]);",
    "simdgroup matrices": (
        "simdgroup_float8x8 a, c(0); simdgroup_load(a, x, 8); simdgroup_multiply_accumulate(c, a, a, c); "
        "c.thread_elements()[0] += 1; simdgroup_store(c, x, 8, ulong2(0, 0), true);"
    ),
    "shuffles": (
        "x[0] = simd_shuffle_down(x[1], 16) + simd_broadcast(half(1), 0) + simd_shuffle(uint2(1), 3).x + "
        "quad_sum(int(i)) + simd_prefix_exclusive_sum(i);"
    ),
    "votes": "x[0] = simd_all(i > 3) ? 1 : ulong(simd_ballot(i > 5)) & 1;",
    "limits and traits": (
        "x[1] = M_PI_4_H + M_2_SQRTPI_H + FLT_RADIX + HALF_MIN_EXP + nextafter(float2(1), float2(2)).x; "
        "x[0] = metal::numeric_limits<float>::infinity() + INFINITY + M_PI_F; "
        'static_assert(metal::is_same_v<metal::remove_cv_t<const int>, int>, "");'
    ),
}
DECLARATIONS = """
constant float TABLE[4] = {1, 2, 3, 4};
constant float4 ROW = {1, 2, 3, 4};
struct Pair { float a; float b; };
constant Pair PAIR = {1, 2};
struct Sizes { static constexpr constant int N = 3; };
inline float sum(Pair p) { return p.a + p.b; }
inline float table_sum(constant float t[4]) { return t[0] + t[3]; }
inline int factorial(int v) { return v < 2 ? 1 : v * factorial(v - 1); }
"""


@pytest.mark.parametrize("language", Language)
def test_what_metal_takes_is_taken(language: Language) -> None:
    """Each in a block of its own, in one kernel."""
    rights = (*LEGAL.values(), *(right for right, *_ in (*TYPES.values(), *OVERLOADS.values())))
    text = kernel("".join(f"{{\n{body}\n}}\n" for body in rights), DECLARATIONS)
    lines = text.splitlines()
    assert [(line, lines[int(line.split(":")[0]) - 1]) for line in said(text, language)] == []


def test_messages_have_metals_words() -> None:
    message = (
        "cannot initialize a variable of type '__local float *__private' with an lvalue of type '__global float[8]'"
    )
    assert (
        to_metal_words(message)
        == "cannot initialize a variable of type 'device float *' with an lvalue of type 'threadgroup float[8]'"
    )
    assert to_metal_words("no member of 'legal_name_atomic_int'") == "no member of 'atomic_int'"


# ---- The syntax tree ------------------------------------------------------------------------------------------------

TEMPLATES = """
template <typename T> inline T inner(T v) { return v + v; }
template <typename T> inline T outer(T v) { return inner(v) + inner(v); }
template <typename T> inline T unused(T v) { return v; }
template <typename T> struct Box { T v; T get() const { return v; } };
"""


def test_instantiations_are_followed_from_where_they_are_used_each_once() -> None:
    text = kernel("x[0] = outer(1.0f) + outer(2.0f) + outer(3); Box<half> box = {1}; x[1] = box.get();", TEMPLATES)
    nodes = walk(parse(text, Language.METAL_3_1, (mlx_headers(),)))
    functions = [n.cursor.spelling for n in nodes if n.instantiated and n.parent is None]
    assert sorted(functions) == ["get", "inner", "inner", "outer", "outer"]
    assert {n.type for n in nodes if n.instantiated and n.kind == "PARM_DECL"} == {"__private float", "__private int"}


def test_a_node_knows_its_function() -> None:
    nodes = walk(
        parse(kernel("float inside = 1;", "constant float OUTSIDE = 1;"), Language.METAL_3_1, (mlx_headers(),))
    )
    functions = {n.cursor.spelling: n.function() for n in nodes if n.kind == "VAR_DECL"}
    assert functions["OUTSIDE"] is None
    assert functions["inside"] is not None and functions["inside"].cursor.spelling == "k"


# ---- Swizzles --------------------------------------------------------------------------------------------------------


def members(width: int) -> list[str]:
    line = next(line for line in swizzle_header().splitlines() if line.startswith(f"#define LEGAL_SWIZZLES_{width} "))
    found = re.findall(r"\)\) (?:T|vec<T, \d>) ([a-z, ]+);", line)
    return [name for names in found for name in names.split(", ")]


def test_all_of_them_are_there_once() -> None:
    """n elements have n^2 + n^3 + n^4 swizzles, by two sets of names; the elements themselves are members."""
    for width in (2, 3, 4):
        assert len(members(width)) == len(set(members(width))) == 2 * (width**2 + width**3 + width**4) + width


def test_one_that_repeats_an_element_cannot_be_written() -> None:
    for names in re.findall(r"put = \w+\)\) (?:T|vec<T, \d>) ([a-z, ]+);", swizzle_header()):
        assert all(len(set(name)) == len(name) for name in names.split(", "))


# C++17 in what must be C++14, and what OpenCL says that Metal does not.


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
    said_ = find_objection("call to deleted function 'simd_sum'", [], True, None, Language.METAL_3_1)
    assert said_ == "Metal has no overload of 'simd_sum' for this type"


def test_the_reason_that_nothing_fits_is_in_the_message() -> None:
    notes = ["candidate function not viable: no known conversion from 'int' to 'device int *' for 1st argument"]
    said_ = find_objection("no matching function for call to 'f'", notes, True, None, Language.METAL_3_1)
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
    assert find_objection("unused variable 'a'", [], False, "-Wunused", Language.METAL_3_1) is None
