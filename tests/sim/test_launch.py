"""Launching: inputs of every kind, attributes, edges of the grid, seeds, counters, recording, sparse buffers."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx.errors import KernelFault
from cortexmlx.metal import sim
from support.sim_tools import launch

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
ONE = {"output_dtypes": [mx.float32]}


def grid_kernel(source, outputs=1):
    names = [f"out_{k}" for k in range(outputs)]
    return sim.metal_kernel(name="grid", input_names=["x"], output_names=names, source=source)


@pytest.mark.parametrize(
    "dtype", [mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64], ids=str
)
def test_integers_of_every_width_go_in_and_come_out(dtype):
    x = mx.array([0, 1, 1, 0, 1, 0, 0, 1, 1]).astype(dtype)
    y, _ = launch(I + "y[i] = x[i];", count=9, threadgroup=4, x=x, dtype=dtype)
    assert y.dtype == dtype
    assert mx.array_equal(y, x)


@pytest.mark.parametrize("dtype", [mx.int64, mx.complex64], ids=str)
def test_wide_elements_go_in_and_come_out(dtype):
    x = mx.arange(9).astype(dtype) * (1 + 2j if dtype == mx.complex64 else 10**12)
    y, _ = launch(I + "y[i] = x[i];", count=9, threadgroup=4, x=x, dtype=dtype)
    assert mx.array_equal(y, x)


def test_strided_inputs_are_copied_or_seen_as_they_are():
    base = mx.arange(24).astype(mx.float32).reshape(4, 6)
    source = I + "y[i] = x[(i / 4) * x_strides[0] + (i % 4) * x_strides[1]] + 100 * x_strides[1];"
    for contiguous, stride in ((True, 1), (False, 6)):
        kernel = sim.metal_kernel(
            name="strided", input_names=["x"], output_names=["y"], source=source, ensure_row_contiguous=contiguous
        )
        (y,) = kernel(
            inputs=[base.T], grid=(24, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(6, 4)], output_dtypes=[mx.float32]
        )
        assert mx.array_equal(y, base.T + 100 * stride)


def test_an_index_past_the_end_of_a_strided_view_is_out_of_bounds():
    base = mx.arange(24).astype(mx.float32).reshape(4, 6)[:2]
    kernel = sim.metal_kernel(
        name="view",
        input_names=["x"],
        output_names=["y"],
        source="y[0] = x[12];",
        ensure_row_contiguous=False,
    )
    with pytest.raises(KernelFault, match="element 12 of 'x' \\(12 elements"):
        kernel(inputs=[base], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32])


def test_python_scalars_become_references():
    kernel = sim.metal_kernel(
        name="scalars", input_names=["a", "b", "c"], output_names=["y"], source="y[0] = a + b + (c ? 100.0f : 0.0f);"
    )
    (y,) = kernel(inputs=[2, 0.5, True], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], **ONE)
    assert y.item() == 102.5


def test_attributes_of_a_grid_that_threadgroups_do_not_divide():
    names = [
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threads_per_grid",
        "threadgroups_per_grid",
    ]
    scalars = [
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "quadgroup_index_in_threadgroup",
        "thread_index_in_quadgroup",
        "threads_per_simdgroup",
    ]
    grid, threadgroup = (7, 5, 3), (4, 3, 2)
    lines = ["uint3 g = thread_position_in_grid; uint at = (g.z * 5 + g.y) * 7 + g.x;"]
    lines += [f"for (int k = 0; k < 3; k++) out_{n}[at * 3 + k] = {name}[k];" for n, name in enumerate(names)]
    lines += [f"out_{n + len(names)}[at] = {name};" for n, name in enumerate(scalars)]
    shapes = [(3, 5, 7, 3)] * len(names) + [(3, 5, 7)] * len(scalars)
    results = grid_kernel("\n".join(lines), len(shapes))(
        inputs=[mx.zeros((8,))],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=shapes,
        output_dtypes=[mx.uint32] * len(shapes),
    )
    got = dict(zip(names + scalars, map(np.array, results), strict=True))
    for z, y, x in itertools.product(range(3), range(5), range(7)):
        at = np.array([x, y, z])
        group = at // threadgroup
        size = np.minimum(threadgroup, grid - group * threadgroup)
        local = at % threadgroup
        index = local[0] + size[0] * (local[1] + size[1] * local[2])
        expected = [at, local, group, size, threadgroup, grid, [2, 2, 2]]
        for name, value in zip(names, expected, strict=True):
            assert got[name][z, y, x].tolist() == list(value), name
        simdgroups = -(-size.prod() // 32)
        values = [index, index % 32, index // 32, simdgroups, index // 4, index % 4, 32]
        for name, value in zip(scalars, values, strict=True):
            assert got[name][z, y, x] == value, name


def test_a_threadgroup_larger_than_the_grid_is_clipped():
    _, report = launch(I + "y[i] = threads_per_threadgroup.x;", count=10, threadgroup=256)
    assert report.threadgroup == (10, 1, 1)


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


def test_recordings_nest_and_the_table_names_every_buffer():
    with sim.recording() as outer:
        launch(I + "y[i] = x[i];")
        with sim.recording() as inner:
            launch(I + "y[i] = x[i];")
    assert (len(outer.launches), len(inner.launches)) == (2, 1)
    assert {"x", "y"} <= set(outer.last.table().split())


def test_an_element_beyond_four_gigabytes_is_reached_with_a_64_bit_offset():
    big = sim.SparseArray((5, 1 << 30), mx.bfloat16)
    big.put((4, 5), mx.arange(1, 9).astype(mx.bfloat16))
    kernel = sim.metal_kernel(
        name="far",
        input_names=["big"],
        output_names=["y"],
        source="uint i = thread_position_in_grid.x; y[i] = big[4 * size_t(big_shape[1]) + 5 + i] + big[i];",
    )
    size = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)], "output_dtypes": [mx.bfloat16]}
    for checked in (True, False):
        with sim.options(checked=checked):
            (y,) = kernel(inputs=[big], **size)
        assert y.tolist() == list(range(1, 9))
    assert kernel.last_report.kernel == "far"


def test_a_32_bit_offset_into_a_large_buffer_is_caught():
    big = sim.SparseArray((1 << 16, 1 << 16), mx.float16)
    kernel = sim.metal_kernel(
        name="near",
        input_names=["big"],
        output_names=["y"],
        source="int row = 40000 + int(thread_position_in_grid.x); y[thread_position_in_grid.x] = big[row * 100000];",
    )
    with pytest.raises(KernelFault, match="product overflows 'int'"):
        kernel(inputs=[big], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[mx.float16])


def test_wrong_calls_are_refused_in_words():
    kernel = grid_kernel("out_0[0] = x;")
    call = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    with pytest.raises(ValueError, match="takes 1 inputs, 2 were given"):
        kernel(inputs=[1.0, 2.0], **call)
    with pytest.raises(ValueError, match="1 outputs, 2 shapes and 1 dtypes"):
        kernel(inputs=[1.0], **{**call, "output_shapes": [(1,), (1,)]})
    with pytest.raises(KernelFault, match="must be at least 1"):
        kernel(inputs=[1.0], **{**call, "grid": (0, 1, 1)})
    with pytest.raises(ValueError, match="unknown compile options"):
        sim.metal_kernel(name="k", input_names=[], output_names=["y"], source="", compile_options={"math_mode": "odd"})
