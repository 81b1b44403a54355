"""How launches are simulated: seeds, orders, recordings."""

import mlx.core as mx
import numpy as np

from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


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
