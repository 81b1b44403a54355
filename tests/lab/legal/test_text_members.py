"""Member functions that give out parts of their object, which lies in thread memory."""

from support.kernels.legal_tools import assert_told_apart, kernel, said

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
