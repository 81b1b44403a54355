"""A launch that would never end is ended: by the hooks where threads touch memory or meet, else by a jump."""

import re
import time

import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
SPIN = """
device atomic_int* flag = (device atomic_int*)y;
if (i == SETTER) atomic_store_explicit(flag, 1, memory_order_relaxed);
while (atomic_load_explicit(flag, memory_order_relaxed) == 0) { }
"""
ENDLESS = {
    "a wait for a store that a waiting thread makes": SPIN.replace("i == SETTER", "i > 900"),
    "a loop over memory": "int k = 0;\nwhile (x[k % 8] >= 0) { k++; }\ny[i] = k;",
    "a loop that only computes": "uint k = i;\nwhile (k != 7777777) { k = k * 2 + 2; }\ny[i] = k;",
    "a loop that does nothing": "y[i] = 1;\nfor (;;) { }",
    "a loop of barriers": "y[i] = 1;\nfor (;;) { threadgroup_barrier(mem_flags::mem_none); }",
    "a loop of sums": "float v = x[i];\nwhile (simd_any(v >= 0)) { v = simd_sum(v); }\ny[i] = v;",
}


NAMED = {"a wait for a store that a waiting thread makes", "a loop over memory", "a loop of sums"}
"""The line of these is known when they are watched."""


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_an_endless_launch_is_ended(name, checked):
    started = time.process_time()
    with sim.options(patience=0.1, checked=checked), pytest.raises(KernelFault) as caught:
        launch(I + ENDLESS[name], init_value=0)
    assert time.process_time() - started < 5
    for words in ("probe", "thread (", "no thread has come to its end for 0.1 s"):
        assert words in str(caught.value)
    if checked and name in NAMED:
        assert re.search(r'line \d+: ".*while \(', str(caught.value))


def test_a_launch_whose_threads_come_to_their_ends_may_take_longer_than_its_patience():
    work = I + "float v = 0; for (int k = 0; k < 40000; k++) v += x[k % 64]; y[i] = v;"
    with sim.options(patience=0.1):
        started = time.process_time()
        launch(work, count=1536)
    assert time.process_time() - started > 0.1


def test_the_next_launch_is_as_if_nothing_had_been():
    for _ in range(2):
        with sim.options(patience=0.1), pytest.raises(KernelFault):
            launch(I + ENDLESS["a loop that only computes"])
        y, _ = launch(I + "y[i] = simd_sum(x[i]);")
        assert y[0].item() == 496
