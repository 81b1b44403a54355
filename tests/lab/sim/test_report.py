"""What a launch did, counted: traffic per buffer, coalescing, barriers, simdgroup operations, threadgroup memory."""

import mlx.core as mx
import pytest

from cortexmlx.metal.lab import sim
from support.kernels.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


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


def test_barriers_and_simdgroup_operations_are_counted():
    body = (
        "float v = simd_sum(x[i]); threadgroup_barrier(mem_flags::mem_none); v += simd_shuffle_xor(v, 1); "
        "simdgroup_barrier(mem_flags::mem_none); y[i] = simd_any(v > 1) ? v : 0.0f;"
    )
    _, report = launch(I + body, count=256, threadgroup=64)
    assert report.barriers == 4 and report.simdgroup_barriers == 8
    assert report.simd_ops == {"reduce": 8, "shuffle": 8, "vote": 8, "matrix": 0, "barrier": 0}


def test_threadgroup_memory_is_summed():
    _, report = launch(
        "threadgroup float a[64]; threadgroup half b[32][3]; " + I + "a[i] = 1; b[i % 32][0] = 1; y[i] = a[i];"
    )
    assert report.threadgroup_memory == 256 + 192
