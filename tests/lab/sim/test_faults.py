"""Planted faults: each small kernel is right in one form and wrong in another, and only the wrong one is refused."""

import mlx.core as mx
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
SHARED = "threadgroup float s[64]; uint i = thread_position_in_threadgroup.x; "
LOCAL = "threadgroup float s[32]; uint l = thread_position_in_threadgroup.x; "
MEET = "threadgroup_barrier(mem_flags::mem_threadgroup); "

# name -> (right, wrong, what the message must say)
PAIRS = {
    "read past the end": (
        I + "y[i] = x[i];",
        I + "y[i] = x[i + 1];",
        ["reads 4 bytes outside", "element 64 of 'x'", "(63, 0, 0)"],
    ),
    "read before the start": (
        I + "y[i] = x[i];",
        I + "y[i] = x[int(i) - 3];",
        ["reads 4 bytes outside", "of 'x' (64 elements of 4 bytes)"],
    ),
    "read gigabytes away": (
        I + "y[i] = x[i];",
        I + "y[i] = x[ulong(i) * 500000000ul];",
        ["reads 4 bytes outside", "of 'x'"],
    ),
    "write past the end": (
        I + "y[i] = x[i];",
        I + "y[i + 4] = x[i];",
        ["writes 4 bytes outside", "element 64 of 'y'"],
    ),
    "vector read over the end": (
        I + "y[i] = (*(const device float4*)(x + i / 4 * 4)).x;",
        I + "y[i] = (*(const device float4*)(x + i / 4 * 4 + 4)).x;",
        ["reads 16 bytes outside", "element 64 of 'x'"],
    ),
    "write to an input": (
        I + "y[i] = x[i];",
        I + "((device float*)x)[i] = 1; y[i] = x[i];",
        ["writes to an input", "of 'x'"],
    ),
    "threadgroup memory past the end": (
        SHARED + "threadgroup float* p = s; p[i] = x[i]; " + MEET + "y[i] = p[63 - i];",
        SHARED + "threadgroup float* p = s; p[i] = x[i]; " + MEET + "y[i] = p[64 - i];",
        ["byte 256 of threadgroup memory 's' (256 bytes)"],
    ),
    "index outside an own array": (
        I + "float a[4] = {1, 2, 3, 4}; y[i] = a[i % 4];",
        I + "float a[4] = {1, 2, 3, 4}; y[i] = a[i % 5];",
        ["index 4 of 'float[4]'"],
    ),
    "a component of a vector beyond the last": (
        I + "float4 v = x[i]; y[i] = v[i % 4];",
        I + "float4 v = x[i]; y[i] = v[i];",
        ["index"],
    ),
    "a vector that is not aligned": (
        I + "y[i] = i < 8 ? ((const device float4*)x)[i].x : 0.0f;",
        I + "y[i] = i < 8 ? ((const device float4*)(x + 1))[i].x : 0.0f;",
        ["a multiple of 4 only"],
    ),
    "missing barrier": (
        SHARED + "s[i] = x[i]; " + MEET + "y[i] = s[63 - i];",
        SHARED + "s[i] = x[i]; y[i] = s[63 - i];",
        ["threadgroup memory 's'"],
    ),
    "barrier that orders nothing": (
        SHARED + "s[i] = x[i]; " + MEET + "y[i] = s[63 - i];",
        SHARED + "s[i] = x[i]; threadgroup_barrier(mem_flags::mem_none); y[i] = s[63 - i];",
        ["race", "threadgroup memory 's'", "with no barrier between them"],
    ),
    "barrier of the wrong memory": (
        SHARED + "s[i] = x[i]; " + MEET + "y[i] = s[63 - i];",
        SHARED + "s[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i] = s[63 - i];",
        ["race", "threadgroup memory 's'"],
    ),
    "simdgroup barrier across simdgroups": (
        SHARED + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[i ^ 1];",
        SHARED + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[i ^ 32];",
        ["threadgroup memory 's'"],
    ),
    "lanes of a simdgroup without a barrier": (
        SHARED + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[i ^ 1];",
        SHARED + "s[i] = x[i]; y[i] = s[i ^ 1];",
        ["threadgroup memory 's'"],
    ),
    "memory reused before all have read": (
        SHARED + "s[i] = x[i]; " + MEET + "float v = s[63 - i]; " + MEET + "s[i] = v; " + MEET + "y[i] = s[i];",
        SHARED + "s[i] = x[i]; " + MEET + "float v = s[63 - i]; s[i] = v; " + MEET + "y[i] = s[i];",
        ["race", "threadgroup memory 's'"],
    ),
    "uninitialised threadgroup memory": (
        SHARED + "if (i < 63) s[i] = x[i]; " + MEET + "y[i] = i < 63 ? s[i] : 0.0f;",
        SHARED + "if (i < 63) s[i] = x[i]; " + MEET + "y[i] = s[i];",
        ["reads byte 252 of threadgroup memory 's'", "which nothing has written"],
    ),
    "a thread returns before the barrier": (
        I + MEET + "if (i == 3) { y[i] = 0; return; } y[i] = 1;",
        I + "if (i == 3) { y[i] = 0; return; } " + MEET + "y[i] = 1;",
        ["waits at a threadgroup_barrier", "thread (3, 0, 0)", "it has returned"],
    ),
    "two barriers that look alike": (
        I + "float v = i < 32 ? 1 : 2; " + MEET + "y[i] = v;",
        I + "if (i < 32) { y[i] = 1; " + MEET + "y[i] += 2; } else { y[i] = 3; " + MEET + "y[i] += 4; }",
        ["waits at a threadgroup_barrier", "waits or runs elsewhere"],
    ),
    "a barrier in a loop of uneven length": (
        I + "for (int k = 0; k < 3; k++) { " + MEET + "} y[i] = 1;",
        I + "for (uint k = 0; k < 2 + i / 32; k++) { " + MEET + "} y[i] = 1;",
        ["waits at a threadgroup_barrier"],
    ),
    "a lane returns before a simdgroup barrier": (
        I + "simdgroup_barrier(mem_flags::mem_none); y[i] = 1;",
        I + "if (i == 5) { y[i] = 0; return; } simdgroup_barrier(mem_flags::mem_none); y[i] = 1;",
        ["waits at a simdgroup_barrier", "thread (5, 0, 0)"],
    ),
    "a value from a lane that is not there": (
        I + "y[i] = simd_shuffle_xor(x[i], 1);",
        I + "y[i] = x[i]; if (i % 2 == 0) { y[i] = simd_shuffle_xor(x[i], 1); }",
        ["takes a value from lane", "takes no part"],
    ),
    "matrix product with half a simdgroup": (
        I + "simdgroup_float8x8 m(1.0f); simdgroup_multiply(m, m, m); y[i] = m.thread_elements()[0];",
        I + "y[i] = 0; if (i % 32 < 16) { simdgroup_float8x8 m(1.0f); simdgroup_multiply(m, m, m); y[i] = 1; }",
        ["takes no part"],
    ),
    "too much threadgroup memory": (
        I + "if (i < 64) { threadgroup float s[8192]; s[i] = 1; y[i] = s[i]; }",
        I + "if (i < 64) { threadgroup float s[8193]; s[i] = 1; y[i] = s[i]; }",
        ["bytes of threadgroup memory, at most 32768"],
    ),
    "misaligned vector": (
        I + "y[i] = (*(const device float4*)(x + 4)).x;",
        I + "y[i] = (*(const device float4*)(x + 1)).x;",
        ["an address that is a multiple of 4 only"],
    ),
    "a vector in an array of its numbers": (
        I + "alignas(16) threadgroup half s[8]; if (i == 0) *(threadgroup half4*)(s + 4) = half4(1); y[i] = 0;",
        I + "threadgroup half s[8]; if (i == 0) *(threadgroup half4*)(s + 4) = half4(1); y[i] = 0;",
        ["an address that is a multiple of 2 only"],
    ),
    "misaligned atomic": (
        I + "atomic_store_explicit((device atomic_uint*)(y + i), i, memory_order_relaxed);",
        I + "y[i] = 0; atomic_store_explicit((device atomic_uint*)((device uchar*)y + 2), i, memory_order_relaxed);",
        ["writes 4 bytes at an address that is a multiple of 2 only"],
    ),
    "32-bit offset": (
        I + "long at = long(i) * 100000000; y[i] = at > 0 ? 1 : 0;",
        I + "int at = int(i) * 100000000; y[i] = at > 0 ? 1 : 0;",
        ["product overflows 'int'"],
    ),
    "division by zero": (I + "y[i] = 100 / int(i + 1);", I + "y[i] = 100 / int(i);", ["division by zero"]),
    "quotient of the lowest integer": (
        I + "int low = int(0x80000000u + i); y[i] = low / (i == 0 ? 1 : -1);",
        I + "int low = int(0x80000000u + i); y[i] = low / -1;",
        ["quotient overflows 'int'"],
    ),
    "an element that nobody writes": (
        I + "y[i] = x[i];",
        I + "if (i != 7) y[i] = x[i];",
        ["1 of 64 elements of output 'y' are never written, the first is 7"],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_planted_fault_is_reported(name):
    _, wrong, said = PAIRS[name]
    with pytest.raises(KernelFault) as caught:
        launch(wrong)
    for words in ["probe", *said]:
        assert words in str(caught.value)


def test_the_right_kernels_have_no_fault():
    """One after the other in one kernel, but for what returns and what takes all of the threadgroup memory."""
    apart = {"a thread returns before the barrier", "too much threadgroup memory"}
    launch("".join(f"{{ {right} }}\n" for name, (right, *_) in PAIRS.items() if name not in apart))
    for name in apart:
        launch(PAIRS[name][0])


GROUPS = {
    "write by two threadgroups": ("y[i] = x[i];", "y[i / 2 * 0] = x[i]; y[i] = x[i];", "wrote"),
    "threadgroup memory that only another threadgroup filled": (
        LOCAL + "s[l] = x[i]; " + MEET + "y[i] = s[31 - l];",
        LOCAL + "if (i < 32) s[l] = x[i]; " + MEET + "y[i] = s[31 - l];",
        "threadgroup memory 's' .* which nothing has written",
    ),
    "read of what another threadgroup writes": ("y[i] = x[i]; x[63 - i];", "y[i] = 1; y[i] += y[63 - i];", "of 'y'"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_race_between_threadgroups_is_found_in_any_order(name):
    right, wrong, said = GROUPS[name]
    launch(I + right, threadgroup=32)
    for seed in range(4):
        with sim.options(seed=seed), pytest.raises(KernelFault, match=said):
            launch(I + wrong, threadgroup=32)


@pytest.mark.parametrize(
    "name", ["missing barrier", "barrier that orders nothing", "memory reused before all have read"]
)
def test_a_race_is_found_whatever_the_order_of_threads(name):
    for seed in range(8):
        with sim.options(seed=seed), pytest.raises(KernelFault):
            launch(PAIRS[name][1])


def test_threads_that_write_the_same_value_are_counted_but_let_pass():
    y, report = launch(I + "y[0] = 5; if (i > 0) y[i] = x[i];", threadgroup=32)
    assert y[0].item() == 5
    assert report.benign_races == 63


def test_atomics_do_not_race_with_each_other_but_with_plain_accesses_they_do():
    add = "atomic_fetch_add_explicit((device atomic_int*)y, 1, memory_order_relaxed); "
    launch(I + add, threadgroup=32, init_value=0)
    with pytest.raises(KernelFault, match="race"):
        launch(I + add + "if (i == 40) y[0] = 1;", threadgroup=32, init_value=0)


def test_threads_may_share_an_element_when_each_has_its_own_bytes():
    own = I + "((device ushort*)y)[i] = ushort(i);"
    y, _ = launch(own, outputs=32)
    assert y.view(mx.uint16).tolist() == list(range(64))
    with pytest.raises(KernelFault, match="race"):
        launch(I + "((device ushort*)y)[i] = ushort(i); if (i == 5) y[0] = 1;", outputs=32)
    with pytest.raises(KernelFault, match="race"):
        launch(I + "if (i == 0) y[3] = 1; ((device ushort*)y)[i] = ushort(i);", outputs=32)


def test_threadgroup_elements_can_be_shared_by_bytes_too():
    halves = "threadgroup float s[32]; threadgroup ushort* p = (threadgroup ushort*)s; " + I
    launch(halves + "p[i] = ushort(i); " + MEET + "y[i] = p[63 - i];")
    launch(halves + "if (i < 32) s[i] = 0; " + MEET + "p[i] = ushort(i); " + MEET + "y[i] = p[63 - i] + s[i / 2];")
    with pytest.raises(KernelFault, match="race"):
        launch(halves + "p[i] = ushort(i); if (i == 9) s[0] = 1; " + MEET + "y[i] = p[i];")
    with pytest.raises(KernelFault, match="nothing has written"):
        launch(halves + "if (i < 63) p[i] = ushort(i); " + MEET + "y[i] = s[i / 2];")


def test_copies_of_whole_structs_are_watched_too():
    header = "struct Block { float v[12]; };\n"
    copy = I + "if (i < 5) ((device Block*)y)[i] = ((const device Block*)x)[{}];"
    launch(copy.format("i"), header=header, outputs=60)
    with pytest.raises(KernelFault, match="outside"):
        launch(copy.format("i + 1"), header=header, outputs=60)
    with pytest.raises(KernelFault, match="race"):
        launch(copy.format("i") + " if (i == 40) y[13] = 1;", header=header, outputs=60)
    _, report = launch(copy.format("i"), header=header, outputs=60)
    assert report.buffers["x"].bytes_read == report.buffers["y"].bytes_written == 240


def test_after_a_fault_the_next_launch_is_clean():
    for _ in range(3):
        with pytest.raises(KernelFault):
            launch(PAIRS["a thread returns before the barrier"][1])
        launch(PAIRS["missing barrier"][0])
