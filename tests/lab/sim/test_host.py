"""Kernels out of MLX's headers: found, put together and called with buffers by index and function constants."""

import numpy as np
import pytest

from cortexmlx.errors import KernelCompileError, KernelFault
from cortexmlx.metal.lab.sim import host
from cortexmlx.metal.lab.sim.host import HostKernel, OutputBuffer, flatten

KERNEL = """
constant bool has_offset [[function_constant(0)]];
constant int scale [[function_constant(1)]];
template <typename T, int N>
[[kernel]] void probe(
    const device T* x [[buffer(0)]],
    device T* y [[buffer(3)]],
    const constant int& count [[buffer(1)]],
    const device T* offset [[buffer(2), function_constant(has_offset)]],
    uint3 at [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  if (int(at.x) < count) {
    y[at.x] = x[at.x] * T(scale * N) + T(lane) + (has_offset ? offset[0] : T(0));
  }
}
"""


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.setattr(host, "flatten", lambda headers, marked=False: KERNEL)
    return lambda **constants: HostKernel(["probe.h"], "probe", "float, 2", constants)


X = np.arange(40, dtype=np.float32)


def run(kernel, **more):
    buffers = {0: X, 1: np.array([40], np.int32), 3: OutputBuffer(160, 4), **{int(k[1:]): v for k, v in more.items()}}
    launched = kernel(buffers, (2, 1, 1), (32, 1, 1))
    return launched.outputs[0].view(np.float32)


def test_buffers_constants_and_attributes_arrive_where_the_signature_says(probe):
    lanes = np.arange(40) % 32
    assert np.array_equal(run(probe(scale=3)), X * 6 + lanes)
    assert np.array_equal(run(probe(scale=3, has_offset=True), b2=np.array([100], np.float32)), X * 6 + lanes + 100)


def test_a_fault_in_it_names_the_buffer_by_its_index(probe):
    with pytest.raises(KernelFault, match=r"probe<float, 2>.*element 40 of 'buffer\(0\)'"):
        run(probe(scale=1), b1=np.array([41], np.int32))


def test_a_kernel_that_is_not_there_is_named(probe):
    with pytest.raises(KernelCompileError, match="no kernel function 'other'"):
        HostKernel(["probe.h"], "other", "float", {})


def test_each_header_is_in_the_text_once_and_those_of_the_preamble_are_not():
    text = flatten(["sdpa_vector.h", "sdpa_vector.h"])
    assert text.count("[[kernel]] void sdpa_vector(") == 1
    assert "#pragma once" not in text and "utils.h" not in text
