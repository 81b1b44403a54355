"""What the front end reads: the same lines, with what OpenCL spells another way."""

from cortexmlx.metal.lab.legal.text import to_opencl
from cortexmlx.metal.lab.sim.toolchain import mlx_headers
from support.kernels.legal_tools import assert_told_apart, kernel, said


def one(text: str) -> str:
    """The text as the front end reads it, with single spaces."""
    return " ".join(to_opencl(text).split())


def test_no_line_moves() -> None:
    for path in [*(mlx_headers() / "mlx/backend/metal/kernels").rglob("*.h")]:
        text = path.read_text()
        assert to_opencl(text).count("\n") == text.count("\n"), path


def test_a_threadgroup_variable_is_a_static_and_a_pointer_is_not() -> None:
    for variable in ("float s[8]", "vec<T, 4> a, b[2]", "T s[N * (M + 1)] = {0}", "Pair<float, int> p"):
        assert one(f"{{ threadgroup {variable}; }}").startswith("{ static __attribute__"), variable
    for other in ("float* p = s", "T& v = s[0]", "vec<T, 4>* f(threadgroup T* p)", "float* p"):
        assert "static" not in one(f"{{ threadgroup {other}; }}"), other


def test_attributes_of_metal_become_annotations_and_those_of_cpp_stay() -> None:
    assert one("device T* x [[buffer(0), function_constant(on)]]").count("annotate(") == 2
    assert 'annotate("metal kernel")' in one("[[kernel]] void k();")
    assert one("[[maybe_unused]] int a;") == "[[maybe_unused]] int a;"
    assert one("x[a[0]][b[1]] = 1;") == "x[a[0]][b[1]] = 1;"


def test_a_bfloat_literal_is_a_conversion_and_a_name_is_none() -> None:
    assert one("v = 1.5bf + 2bf;") == "v = (bfloat(1.5f)) + (bfloat(2f));"
    assert one("v = w1bf;") == "v = w1bf;"


# ---- Member functions that give out parts of their object, which lies in thread memory -----------------------------

TILE = """
template <typename T>
struct Tile {
  T values[4];
  thread T& at(int i) { return values[i]; }
  const thread T& at(int i) const { return values[i]; }
  thread T* begin() { return reinterpret_cast<thread T*>(values); }
  thread Tile& operator+=(T v) { at(0) += v; return *this; }
  thread Tile& scale(T f) thread { for (thread T& v : values) { v *= f; } return *this; }
};
"""


def test_parts_of_an_object_are_thread_memory() -> None:
    body = (
        "Tile<float> t; t.at(1) = x[0]; t += 2; t.scale(3).at(2) = 1; thread float* p = t.begin(); x[1] = *p + t.at(0);"
    )
    assert said(kernel(body, TILE)) == []


def test_other_memory_is_not_given_out_as_the_threads() -> None:
    header = "inline {} float& first(device float* p) {{ return p[0]; }} //!"
    assert_told_apart(
        kernel("first(x) = 1;", header.format("device")), kernel("", header.format("thread")), "__thread_memory"
    )
