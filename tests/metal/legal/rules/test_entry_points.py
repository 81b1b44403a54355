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
kernel void plain(device float* y, uint2 at [[thread_position_in_grid]]) { y[at.x] = at.y; }
"""
    assert said(text) == []
