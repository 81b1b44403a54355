"""The static pass: what Metal refuses and C++ would accept, each beside the form that Metal takes."""

import re

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelCompileError
from cortexmlx.metal import sim
from cortexmlx.metal.sim.static_pass import _foreign_words, _misplaced, _unqualified
from cortexmlx.metal.sim.toolchain import mlx_headers
from support.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741

# name -> (header, right body, header, wrong body, what the message says)
SPACES = {
    "a device helper for constant memory": (
        "inline float first(const device float* p) { return p[0]; }\n",
        "y[i] = first(x);",
        "inline float first(const constant float* p) { return p[0]; }\n",
        "y[i] = first(x);",
        "cannot pass pointer to device as a pointer to constant",
    ),
    "threadgroup memory through a device pointer": (
        "",
        "threadgroup float s[64]; threadgroup float* p = s; p[i] = 1; y[i] = p[i];",
        "",
        "threadgroup float s[64]; device float* p = s; p[i] = 1; y[i] = p[i];",
        "threadgroup float",
    ),
    "a reference to a threadgroup variable": (
        "inline float twice(threadgroup float& v) { return 2 * v; }\n",
        "threadgroup float s[64]; s[i] = 1; y[i] = twice(s[i]);",
        "inline float twice(thread float& v) { return 2 * v; }\n",
        "threadgroup float s[64]; s[i] = 1; y[i] = twice(s[i]);",
        "cannot bind reference",
    ),
    "a local where threadgroup memory is expected": (
        "inline float load(threadgroup float* v) { return v[0]; }\n",
        "threadgroup float s[64]; s[i] = 1; y[i] = load(s + i);",
        "inline float load(threadgroup float* v) { return v[0]; }\n",
        "float s[1] = {1}; y[i] = load(s);",
        "to 'threadgroup float *'",
    ),
    "a parameter that names no space": (
        "inline float twice(float v) { return 2 * v; }\n",
        "y[i] = twice(x[i]);",
        "inline float twice(const float* v) { return 2 * v[0]; }\n",
        "float a = x[i]; y[i] = twice(&a);",
        "names no address space",
    ),
    "a template parameter by reference that names no space": (
        "template <typename U> inline void clear(thread U& v) { v = U(0); }\n",
        "float a = 1; clear(a); y[i] = a;",
        "template <typename U> inline void clear(U& v) { v = U(0); }\n",
        "float a = 1; clear(a); y[i] = a;",
        "names no address space",
    ),
    "a local reference that names no space": (
        "",
        "float a = 1;\nthread float& b = a; b = 2; y[i] = a;",
        "",
        "float a = 1;\nfloat& b = a; b = 2; y[i] = a;",
        "'b' is a pointer or reference that names no address space",
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_address_spaces_are_checked(name):
    right_header, right, wrong_header, wrong, said = SPACES[name]
    launch(I + right, header=right_header)
    with pytest.raises(KernelCompileError, match=r"probe: line \d+") as caught:
        launch(I + wrong, header=wrong_header)
    assert said in str(caught.value)


def test_a_helper_for_device_memory_fails_for_seven_elements_and_works_for_eight():
    header = "inline float first(const device float* p) { return p[0]; }\n"
    launch(I + "y[i] = first(x);", header=header, count=8, threadgroup=8)
    with pytest.raises(KernelCompileError, match="pointer to constant as a pointer to device"):
        launch(I + "y[i] = first(x);", header=header, count=7, threadgroup=7)


BFLOAT = {
    "assignment": ("y[i] = T(float(x[i]));", "float v = x[i]; y[i] = v;"),
    "initialization": ("T v = T(1.5f); y[i] = v;", "T v = 1.5f; y[i] = v;"),
    "product with a float": ("y[i] = T(x[i] * 2.0f);", "y[i] = x[i] * 2.0f;"),
    "half": ("half h = 1; y[i] = T(float(h));", "half h = 1; y[i] = h;"),
}


@pytest.mark.parametrize("name", BFLOAT)
def test_a_float_does_not_become_a_bfloat_by_itself(name):
    right, wrong = BFLOAT[name]
    launch(I + right, dtype=mx.bfloat16)
    with pytest.raises(KernelCompileError, match="bfloat"):
        launch(I + wrong, dtype=mx.bfloat16)
    if name != "half":
        launch(I + wrong, dtype=mx.float16)


def test_arithmetic_of_bfloats_stays_bfloat():
    body = (
        "T a = x[i]; a = a * a + a; a += x[i]; a *= 2; a = max(a, -a); float f = a; f += a; y[i] = a > T(f) ? a : T(f);"
    )
    launch(I + body, dtype=mx.bfloat16)


def test_a_struct_may_be_copied_out_of_any_address_space():
    header = "struct Pair { float a; float b; };\ninline float sum(Pair p) { return p.a + p.b; }\n"
    launch(I + "threadgroup Pair s[64]; s[i] = Pair{x[i], 1}; Pair p = s[i]; y[i] = sum(p) + sum(s[i]);", header=header)


def test_a_compile_error_names_the_line_of_the_kernel_text():
    with pytest.raises(KernelCompileError, match=r"kernel:7:.*undeclared identifier 'nonsense'"):
        launch("uint i = thread_position_in_grid.x;\ny[i] = nonsense;")


def test_the_pass_can_be_left_out():
    with sim.options(static_pass=False):
        launch(I + "float a = 1;\nfloat& b = a; y[i] = b;")


def test_nothing_in_the_headers_of_mlx_is_complained_about():
    """They compile on every Mac: what the textual checks say about them would be a false alarm."""
    defines = "".join(re.findall(r"^#define \w+ .*\bconstant\b.*\n", all_mlx_headers(), flags=re.M))
    assert all_mlx_headers().count("\n") > 30000
    for path in mlx_header_files():
        text = defines + path.read_text()
        for check in (_foreign_words, _unqualified, _misplaced):
            said = [c.message for c in check(text)]
            assert said == [] or path.name == "defines.h", path


def mlx_header_files():
    return sorted((mlx_headers() / "mlx/backend/metal/kernels").rglob("*.h"))


def all_mlx_headers():
    return "".join(path.read_text() for path in mlx_header_files())
