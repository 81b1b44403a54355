"""Variables that nothing has written: refused where that is certain, else seen in what is computed from them."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelCompileError, KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741

# name -> (right, wrong)
CERTAIN = {
    "a variable": ("float s = 0; s += x[i]; y[i] = s;", "float s; s += x[i]; y[i] = s;"),
    "in one branch": ("float s = 0; if (i > 3) s = x[i]; y[i] = s;", "float s; if (i > 3) s = x[i]; y[i] = s;"),
    "an index": ("uint k = 0; y[i] = x[k];", "uint k; y[i] = x[k];"),
}
SEEN = {
    "an array of sums": (
        "float s[4] = {0}; for (uint k = 0; k < 4; k++) s[k] += x[i]; y[i] = s[i % 4];",
        "float s[4]; for (uint k = 0; k < 4; k++) s[k] += x[i]; y[i] = s[i % 4];",
    ),
    "one element of an array": (
        "float s[4]; for (uint k = 0; k < 4; k++) s[k] = x[i]; y[i] = s[i % 4];",
        "float s[4]; for (uint k = 0; k < 3; k++) s[k] = x[i]; y[i] = -s[i % 4];",
    ),
    "a vector's component": ("float4 v = 0; v.x = x[i]; y[i] = v.x + v.w;", "float4 v; v.x = x[i]; y[i] = v.x + v.w;"),
    "a member of a struct": ("Pair p; p.a = x[i]; p.b = 1; y[i] = p.a + p.b;", "Pair p; p.a = x[i]; y[i] = p.a + p.b;"),
    "through a function": (
        "float s; put(s, x[i], 1); y[i] = s + simd_sum(s);",
        "float s; put(s, x[i], i > 3); y[i] = s + simd_sum(s);",
    ),
    "through exp": (
        "float s[2] = {0}; s[0] = x[i]; y[i] = exp(-s[i % 2]);",
        "float s[2]; s[0] = x[i]; y[i] = exp(-s[i % 2]);",
    ),
    "a matrix": (
        "simdgroup_float8x8 m(0.0f); simdgroup_float8x8 a(1.0f); simdgroup_multiply_accumulate(m, a, a, m); "
        "y[i] = m.thread_elements()[0];",
        "simdgroup_float8x8 m; simdgroup_float8x8 a(1.0f); simdgroup_multiply_accumulate(m, a, a, m); "
        "y[i] = m.thread_elements()[0];",
    ),
}
HIDDEN = {
    "a largest value": (
        "float s[2] = {-1, -1}; s[0] = x[i]; y[i] = max(s[0], s[i % 2] - 2);",
        "float s[2]; s[0] = -1 - x[i]; y[i] = max(s[0], s[i % 2]);",
    ),
    "a comparison": ("float s[2] = {1, 1}; y[i] = s[i % 2] > 0;", "float s[2]; s[0] = 1; y[i] = s[i % 2] >= 0;"),
    "integers": ("uint s[2] = {1, 1}; y[i] = s[i % 2] + i;", "uint s[2]; s[0] = 1; y[i] = s[i % 2] + i;"),
    "a flag": ("bool s[2] = {true, true}; y[i] = s[i % 2];", "bool s[2]; s[0] = true; y[i] = s[i % 2] ? 0 : 1;"),
}
HEADER = "struct Pair { float a, b; };\nvoid put(thread float& to, float from, bool now) { if (now) to = from; }\n"


@pytest.mark.parametrize("name", CERTAIN)
def test_a_variable_that_is_certainly_read_too_early_is_a_compile_error(name):
    _, wrong = CERTAIN[name]
    with pytest.raises(KernelCompileError, match="uninitialized"):
        launch(I + wrong)


@pytest.mark.parametrize("name", SEEN)
def test_a_float_computed_from_nothing_is_a_fault(name):
    _, wrong = SEEN[name]
    with pytest.raises(KernelFault, match="of output 'y' have been computed from a variable that nothing has written"):
        launch(I + wrong, header=HEADER)


def test_a_narrow_float_shows_it_too():
    for dtype in (mx.float16, mx.bfloat16):
        with pytest.raises(KernelFault, match=r"32 of 64 elements of output 'y' .* the first is 1"):
            launch(I + "T s[2]; s[0] = 0; y[i] = T(s[i % 2] + x[i]);", dtype=dtype)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_one_run_hides_a_second_with_zeros_shows(name):
    _, wrong = HIDDEN[name]
    launch(I + wrong)
    with (
        sim.options(poison=True),
        pytest.raises(KernelFault, match="computed from a variable that nothing has written"),
    ):
        launch(I + wrong)


def test_variables_that_are_written_first_are_no_fault():
    rights = "".join(f"{{ {right} }}\n" for right, _ in (*CERTAIN.values(), *SEEN.values(), *HIDDEN.values()))
    with sim.options(poison=True):
        launch(I + rights, header=HEADER)


def test_a_nan_that_a_kernel_was_given_or_made_is_its_own():
    for x in (mx.full((64,), 0xFFFFFFFF, dtype=mx.uint32).view(mx.float32), mx.full((64,), mx.nan)):
        for poison in (False, True):
            with sim.options(poison=poison):
                y, _ = launch(I + "y[i] = x[i] * 0 + sqrt(-1.0f - i);", x=x)
                assert mx.isnan(y).all()


def test_the_second_run_is_not_recorded():
    with sim.options(poison=True), sim.recording() as seen:
        launch(I + "y[i] = x[i];")
    assert len(seen.launches) == 1 and seen.last.checked
