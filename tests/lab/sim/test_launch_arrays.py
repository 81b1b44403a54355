"""Threadgroup arrays: an index that leaves one meets no other; and Metal's 32 KB are of what is declared."""

import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
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
