"""How launches are simulated: limits, seeds, orders, initial values, recordings; and what a launch did, counted."""

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import KernelFault
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
    for options in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"lockstep": True}, {"checked": False}):
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


def test_recordings_nest_and_the_table_names_every_buffer():
    with sim.recording() as outer:
        launch(I + "y[i] = x[i];")
        with sim.recording() as inner:
            launch(I + "y[i] = x[i];")
    assert (len(outer.launches), len(inner.launches)) == (2, 1)
    assert {"x", "y"} <= set(outer.last.table().split())


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
