"""A Metal kernel's text becomes a kernel of C++ for OpenCL."""

from __future__ import annotations

import pytest

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal.lab.agx.opencl import Instance, opencl_unit

TEXT = """
#include <metal_stdlib>
using namespace metal;
constant bool masked [[function_constant(3)]];
constant int blocks [[function_constant(4)]];

template <typename T>
inline T twice(T x) { return x + x; }

template <typename T, int D, int V = D>
[[kernel]] void first(device T* out [[buffer(0)]]) { threadgroup float other[D]; }

// [[kernel]] void second( in a comment is no kernel }
template <typename T, int D, int V = D>
[[kernel, max_total_threads_per_threadgroup(64)]] void second(
    const device T* in [[buffer(0)]],
    device T* out [[buffer(1)]],
    const constant size_t& stride [[buffer(2)]],
    const constant int* shape [[buffer(3)]],
    const device bool* mask [[buffer(4), function_constant(masked)]],
    const constant int& mask_stride
    [[buffer(5), function_constant(masked)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[D];
  if (masked) { out[0] = float2(in[lane], 1).x; }
}

inline float later() { return 1; }
template [[host_name("second")]] [[kernel]] decltype(second<float, 8>) second<float, 8>;
"""
ARGUMENTS = {"T": "half", "D": "64"}


def unit(text: str = TEXT, function: str = "second", **arguments: str) -> str:
    """The unit behind the dialect."""
    made = opencl_unit(text, Instance(function, ARGUMENTS | arguments, (64, 2, 1)), {"blocks": "7"})
    return made[made.index("constant bool masked") :] if "constant bool masked" in made else made


def test_helpers_stay_and_other_kernels_go() -> None:
    made = unit()
    assert "inline T twice(T x)" in made and "inline float later()" in made
    assert "void first" not in made and "other[D]" not in made
    assert "host_name" not in made and "#include" not in made and made.count("__kernel") == 1


def test_the_template_becomes_names() -> None:
    made = unit()
    assert "typedef half T;" in made and made.index("typedef half T;") < made.index("__kernel")
    body = made[made.index("__kernel") :]
    assert "constexpr int D = 64;" in body and "constexpr int V = D;" in body
    assert "constexpr int V = 128;" in unit(V="128")


def test_function_constants_have_values() -> None:
    assert "constant bool masked = 0;" in unit() and "constant int blocks = 7;" in unit()


def test_parameters_become_those_of_an_opencl_kernel_or_local_variables() -> None:
    made = unit()
    signature = made[made.index("void second(") : made.index(") {", made.index("void second("))]
    assert signature == (
        "void second(const device T* in, device T* out, const ulong stride, const constant int* shape, "
        "const uint groups_x, const uint groups_y, const uint groups_z"
    )
    assert "const device bool* mask = 0;" in made and "const int mask_stride = 0;" in made
    assert "const uint lane = get_sub_group_local_id();" in made
    assert "const uint3 groups = (uint3)(groups_x, groups_y, groups_z);" in made
    assert "reqd_work_group_size(64, 2, 1)" in made


def test_vectors_are_made_by_a_function() -> None:
    assert "make_vec<float2>(in[lane], 1).x" in unit()


@pytest.mark.parametrize(
    ("text", "function", "reason"),
    [
        (TEXT, "third", "no \\[\\[kernel\\]\\] function 'third'"),
        (TEXT.replace("thread_index_in_simdgroup", "color(0)"), "second", "color\\(0\\)"),
        (TEXT.replace("uint lane [[thread_index_in_simdgroup]]", "uint lane"), "second", "without an attribute"),
        (TEXT.replace("typename T, int D,", "typename T, int D, int E,"), "second", "a value for .* 'E'"),
        (TEXT[: TEXT.index("float2")], "second", "never closed"),
    ],
)
def test_what_the_dialect_does_not_know_is_refused(text: str, function: str, reason: str) -> None:
    with pytest.raises(KernelCompileError, match=reason):
        unit(text, function)
