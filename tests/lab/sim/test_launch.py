"""How launches are simulated: limits, seeds, orders, initial values, recordings; and what a launch did, counted."""

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import KernelCompileError, KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


def test_too_many_threads_and_buffers_are_refused_before_anything_runs():
    with pytest.raises(KernelFault, match="2048 threads in a threadgroup"):
        launch(I + "y[i] = 1;", count=2048, threadgroup=2048)
    names = [f"input_{n}" for n in range(31)]
    kernel = sim.metal_kernel(name="wide", input_names=names, output_names=["y"], source="y[0] = input_0[0];")

    def run() -> None:
        shapes = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
        kernel(inputs=[mx.zeros((8,))] * 31, grid=(1, 1, 1), threadgroup=(1, 1, 1), **shapes)

    with pytest.raises(KernelFault, match="32 buffers"):
        run()


def test_an_output_with_an_initial_value_need_not_be_written():
    y, _ = launch(I + "if (i != 7) y[i] = x[i];", init_value=2.5)
    assert y[7].item() == 2.5


# Settings.


def test_the_result_does_not_depend_on_the_seed_and_one_seed_repeats_exactly():
    source = (
        "threadgroup float s[128]; uint i = thread_position_in_threadgroup.x; s[i] = x[thread_position_in_grid.x]; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[thread_position_in_grid.x] = s[127 - i] + simd_sum(s[i]);"
    )
    results = []
    for options in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"checked": False}):
        with sim.options(**options):
            results.append(launch(source, count=512, threadgroup=128)[0])
    for other in results[1:]:
        assert mx.array_equal(results[0], other)


def test_the_seed_decides_the_order():
    orders = set()
    for seed in range(4):
        with sim.options(seed=seed):
            body = "y[i] = atomic_fetch_add_explicit((device atomic_int*)y + 64, 1, memory_order_relaxed);"
            y, _ = launch(I + body, outputs=65, init_value=0)
            orders.add(tuple(np.array(y)[:64].tolist()))
    assert len(orders) > 1


def test_recordings_nest():
    with sim.recording() as outer:
        launch(I + "y[i] = x[i];")
        with sim.recording() as inner:
            launch(I + "y[i] = x[i];")
    assert (len(outer.launches), len(inner.launches)) == (2, 1)
    assert {"x", "y"} <= set(outer.last.buffers)


def test_an_allowed_fault_is_reported_but_does_not_raise():
    with sim.options(allow=frozenset({sim.Fault.UNWRITTEN})):
        _, report = launch(I + "if (i != 7) y[i] = x[i];")
    assert [f.fault for f in report.findings] == [sim.Fault.UNWRITTEN]


# Counters.


def test_traffic_is_counted_per_buffer():
    source = I + "y[i] = x[i] + x[i % 8] + (i < 32 ? x[0] : 0.0f);"
    with sim.recording() as record:
        launch(source, count=64, threadgroup=32)
    x, y = record.last.buffers["x"], record.last.buffers["y"]
    assert (x.reads, x.bytes_read) == (64 + 64 + 32, 4 * 160)
    assert x.distinct_read == 256
    # The first threadgroup reads elements 0 to 31; the second 32 to 63 and the first eight.
    assert x.group_distinct_read == 4 * (32 + 40)
    assert (y.bytes_written, y.distinct_written, y.group_distinct_written) == (256, 256, 256)
    assert (y.bytes_read, x.bytes_written) == (0, 0)
    assert record.last.threads == 64 and record.last.threadgroups == 2


@pytest.mark.parametrize(
    ("index", "share"), [("i", 1.0), ("0", 1.0), ("i * 2", 0.5), ("i * 32", 1 / 32), ("63 - i", 1.0), ("i / 2", 1.0)]
)
def test_coalescing_is_the_share_of_fetched_lines_that_is_used(index, share):
    x = mx.zeros((64 * 32,))
    with sim.recording() as record:
        launch(I + f"y[i] = x[{index}];", x=x, count=64, threadgroup=64)
    counters = record.last.buffers["x"]
    assert counters.simd_accesses == 2
    # A line is 128 bytes; what 32 lanes read side by side fills one.
    assert counters.coalescing == pytest.approx(share, rel=0.01)


# Threadgroup arrays: an index that leaves one meets no other; and Metal's 32 KB are of what is declared.


MEET = "threadgroup_barrier(mem_flags::mem_threadgroup); "
TWO = (
    I + "threadgroup float a[64]; threadgroup float b[64]; threadgroup float* p = {}; a[i] = x[i]; b[i] = x[i]; " + MEET
)


FAR = (("a", "i + (1ul << 34)"), ("b", "long(i) - (1l << 34)"))


@pytest.mark.parametrize(
    ("name", "index"),
    [("a", "i + 64"), ("a", "i + 192"), ("b", "int(i) - 192"), ("a", "i + 100000"), ("b", "i - 64"), *FAR],
)
def test_an_index_outside_one_array_meets_no_other(name, index):
    with pytest.raises(KernelFault, match="reads 4 bytes outside"):
        launch(TWO.format(name) + f"y[i] = p[{index}];")


def test_a_store_outside_one_array_does_not_change_another():
    launch(TWO.format("a") + "y[i] = p[63 - i];")
    with pytest.raises(KernelFault, match=r"writes 4 bytes outside: byte \d+ of threadgroup memory 'a'"):
        launch(TWO.format("a") + "p[i + 192] = 7; " + MEET + "y[i] = b[i];")


def test_an_offset_of_a_round_number_of_gigabytes_meets_no_other_buffer():
    for sign, power in (("+", 33), ("-", 34), ("+", 35), ("-", 36)):
        with pytest.raises(KernelFault, match="reads 4 bytes outside: element"):
            launch(I + f"y[i] = x[i] + x[long(i) {sign} (1l << {power})];")


FITS = {
    "32 KB": "threadgroup float s[8192]; s[i] = x[i]; y[i] = s[i];",
    "three arrays of 32,766 bytes": "".join(f"threadgroup uchar s{n}[10922]; s{n}[i] = 1; " for n in range(3))
    + "y[i] = s0[i] + s1[i] + s2[i];",
    "a branch that is compiled away": "if (sizeof(T) == 2) { threadgroup float s[8448]; s[i] = 1; } y[i] = 1;",
    "a discarded statement": "y[i] = x[i]; if constexpr (sizeof(T) == 2) { threadgroup float s[8448]; s[i] = 1; }",
}
TOO_MUCH = {
    "four bytes more": ("threadgroup float s[8192]; threadgroup uchar c; s[i] = x[i]; c = 1; y[i] = s[i] + c;", 32784),
    "a branch that no thread takes": ("y[i] = x[i]; if (x[i] < 0) { threadgroup float s[8448]; s[i] = 1; }", 33792),
    "two branches that exclude each other": (
        "if (i < 64) { threadgroup float s[5000]; s[i] = 1; y[i] = s[i]; } "
        "else { threadgroup float s[5000]; y[i] = s[i]; }",
        40000,
    ),
    "after all threads have returned": (
        "y[i] = x[i]; if (x[i] >= 0) return; threadgroup float s[8448]; s[i] = 1; y[i] = s[i];",
        33792,
    ),
    "alignment between arrays": (
        "threadgroup uchar a[16383]; threadgroup float4 b[1024]; threadgroup uchar c; "
        "a[i] = 1; b[i] = 1; c = 1; y[i] = a[i] + b[i].x + c;",
        32784,
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_what_is_declared_within_the_limit_runs(name):
    launch(I + FITS[name])


@pytest.mark.parametrize(("name", "checked"), [(name, n % 2 == 0) for n, name in enumerate(TOO_MUCH)])
def test_what_is_declared_beyond_the_limit_is_refused_executed_or_not(name, checked):
    source, total = TOO_MUCH[name]
    with (
        sim.options(checked=checked, static_pass=False),
        pytest.raises(KernelFault, match=f"{total} bytes of threadgroup memory, at most"),
    ):
        launch(I + source)


def test_another_kernel_in_the_same_text_has_its_own_limit():
    other = (
        "[[kernel]] void other(device float* y [[buffer(0)]]) { threadgroup float s[8192]; s[0] = 1; y[0] = s[0]; }\n"
    )
    _, report = launch(I + "threadgroup float s[64]; s[i] = x[i]; y[i] = s[i];", header=other)
    assert report.threadgroup_memory == 256


# Variables that nothing has written: refused where that is certain, else seen in what is computed from them.


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
