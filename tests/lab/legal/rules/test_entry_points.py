"""Kernels: what they return and take."""

import pytest

from support.kernels.legal_tools import assert_told_apart, said

RIGHT = "[[kernel]] void k(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 1; }\n"
WRONG = {
    "returns a value": ("[[kernel]] int k(device float* x [[buffer(0)]]) { return 1; } //!\n", "returns void"),
    "takes a number without an attribute": (
        "[[kernel]] void k(\n  device float* x [[buffer(0)]],\n  uint i) { x[i] = 1; } //!\n",
        "no attribute",
    ),
    "takes a number as a buffer": (
        "[[kernel]] void k(device float* x [[buffer(0)]], int n [[buffer(1)]]) { x[n] = 1; } //!\n",
        "take a pointer or reference",
    ),
    "takes thread memory": (
        "[[kernel]] void k(thread float* x [[buffer(0)]]) { x[0] = 1; } //!\n",
        "must lie in device",
    ),
    "has an attribute that does not exist": (
        "[[kernel]] void k(device float* x [[buffer(0)]], uint i [[position_in_grid]]) { x[i] = 1; } //!\n",
        "no such attribute",
    ),
    "has an attribute that only begins like one": (
        "[[kernel]] void k(device float* x [[buffer(0)]], uint i [[thread_position]]) { x[i] = 1; } //!\n",
        "unknown attribute 'thread_position'",
    ),
    "has two buffers of one index": (
        "[[kernel]] void k(device float* x [[buffer(1)]], device float* y [[buffer(1)]]) { x[0] = y[0]; } //!\n",
        "'buffer(1)' is the index of two",
    ),
    "has a buffer behind the last": (
        "[[kernel]] void k(device float* x [[buffer(31)]]) { x[0] = 1; } //!\n",
        "from 0 to 30",
    ),
    "has a buffer before the first": (
        "[[kernel]] void k(device float* x [[buffer(-1)]]) { x[0] = 1; } //!\n",
        "from 0 to 30",
    ),
    "has threadgroup memory behind the last": (
        "[[kernel]] void k(threadgroup float* x [[threadgroup(31)]]) { x[0] = 1; } //!\n",
        "from 0 to 30",
    ),
    "has two threadgroup arguments of one index": (
        "[[kernel]] void k(threadgroup int* x [[threadgroup(0)]], threadgroup int* y [[threadgroup(0)]]) //!\n"
        "{ x[0] = y[0]; }\n",
        "'threadgroup(0)' is the index of two",
    ),
    "takes threadgroup memory as a buffer": (
        "[[kernel]] void k(threadgroup float* x [[buffer(0)]]) { x[0] = 1; } //!\n",
        "cannot be 'buffer'",
    ),
    "takes device memory as threadgroup memory": (
        "[[kernel]] void k(device float* x [[threadgroup(0)]]) { x[0] = 1; } //!\n",
        "cannot be 'threadgroup'",
    ),
    "takes a float as its position": (
        "[[kernel]] void k(device float* x [[buffer(0)]], float i [[thread_position_in_grid]]) { x[0] = i; } //!\n",
        "is a ushort or uint",
    ),
    "takes an int as its position": (
        "[[kernel]] void k(device float* x [[buffer(0)]], int i [[thread_position_in_grid]]) { x[i] = 1; } //!\n",
        "is a ushort or uint",
    ),
    "takes four numbers as its position": (
        "[[kernel]] void k(device float* x [[buffer(0)]], uint4 i [[thread_position_in_grid]]) { x[i.x] = 1; } //!\n",
        "a vector of two or three",
    ),
    "takes a vector as its lane": (
        "[[kernel]] void k(device float* x [[buffer(0)]], uint3 i [[thread_index_in_simdgroup]]) { x[i.x] = 1; } //!\n",
        "'thread_index_in_simdgroup' is a ushort or uint",
    ),
    "takes two things in one argument": (
        "[[kernel]] void k(device float* x [[buffer(0)]], //\n"
        "  uint i [[thread_index_in_simdgroup, thread_position_in_grid]]) { x[i] = 1; } //!\n",
        "one thing only",
    ),
    "is called by another": (
        "[[kernel]] void j(device float* x [[buffer(0)]]) { x[0] = 1; }\n"
        "[[kernel]] void k(device float* x [[buffer(0)]]) { j(x); } //!\n",
        "no function calls one",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_no_kernel(name: str) -> None:
    wrong, reason = WRONG[name]
    assert_told_apart(RIGHT, wrong, reason)


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
